"""FamilySpec: one base model with its tiers; the content of `family.json`.

Tier k is the layer prefix `[0, exit_layer)` with an exit of its own: a norm gain, and the shared LM
head or one of its own. Segment k holds the layers between the exits of tiers k-1 and k.
"""

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

from mfs_trt.errors import CheckpointError, FamilyError
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, exit_head, exit_norm, tensor_shapes

FORMAT_VERSION = 1
MANIFEST_NAME = "family.json"


@dataclass(frozen=True)
class TierSpec:
    """A servable depth of the family."""

    name: str
    exit_layer: int  # layers [0, exit_layer)
    own_head: bool = False  # False: the family's shared LM head


@dataclass(frozen=True)
class SegmentSpec:
    """Layers `[first_layer, last_layer)` between two consecutive exits."""

    index: int
    first_layer: int
    last_layer: int

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer


@dataclass(frozen=True)
class FamilySpec:
    """A nested model: tiers from shallow to deep over one `ModelConfig`."""

    model: ModelConfig
    tiers: tuple[TierSpec, ...]
    revision: str  # content hash over weights, config and tiers
    weight_files: tuple[str, ...]  # safetensors files in the folder
    dtype: str  # dtype of the stored weights: float32, float16, bfloat16
    end_token_ids: tuple[int, ...] = ()
    source: str = ""  # what it was converted from, for people

    def __post_init__(self) -> None:
        if not self.tiers:
            raise FamilyError("tiers: expected at least one, got none")
        names = [t.name for t in self.tiers]
        if len(set(names)) != len(names):
            raise FamilyError(f"tiers: expected distinct names, got {', '.join(names)}")
        exits = [t.exit_layer for t in self.tiers]
        if any(a >= b for a, b in zip(exits, exits[1:], strict=False)) or exits[0] < 1:
            raise FamilyError(f"tiers: expected ascending exit layers from 1, got {exits}")
        if exits[-1] != self.model.num_layers:
            raise FamilyError(
                f"tiers: expected the last exit after layer {self.model.num_layers}, "
                f"got {exits[-1]}"
            )

    @cached_property
    def segments(self) -> tuple[SegmentSpec, ...]:
        borders = [0, *(t.exit_layer for t in self.tiers)]
        return tuple(
            SegmentSpec(i, a, b) for i, (a, b) in enumerate(zip(borders, borders[1:], strict=False))
        )

    @cached_property
    def group_size(self) -> int:
        """Layers in a layer group: the greatest common divisor of the segments' layer counts."""
        return gcd(*(s.num_layers for s in self.segments))

    @cached_property
    def groups_per_segment(self) -> tuple[int, ...]:
        """Frames that a block of each segment occupies."""
        return tuple(s.num_layers // self.group_size for s in self.segments)

    def norm_name(self, tier_index: int) -> str:
        """Name of the tier's exit norm gain [hidden_size]."""
        return exit_norm(self.tiers[tier_index].exit_layer)

    def head_name(self, tier_index: int) -> str:
        """Name of the tier's head matrix [vocab_size, hidden_size]: own, shared or tied."""
        tier = self.tiers[tier_index]
        if tier.own_head:
            return exit_head(tier.exit_layer)
        return EMBEDDING if self.model.tie_word_embeddings else LM_HEAD

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the family folder: name → shape, in the order of writing."""
        shapes = tensor_shapes(self.model)
        gain = shapes.pop(FINAL_NORM)
        for i, tier in enumerate(self.tiers):
            shapes[self.norm_name(i)] = gain
            if tier.own_head:
                shapes[self.head_name(i)] = shapes[EMBEDDING]
        return shapes

    def tier_index(self, name: str) -> int:
        """Index of the tier called `name`; raises `FamilyError` listing the known names."""
        for i, tier in enumerate(self.tiers):
            if tier.name == name:
                return i
        known = ", ".join(t.name for t in self.tiers)
        raise FamilyError(f"tier: expected one of {known}, got {name!r}")

    def to_json(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["model"] = self.model.to_json()
        data["tiers"] = [asdict(t) for t in self.tiers]
        return {"format_version": FORMAT_VERSION, **data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "FamilySpec":
        values = dict(data)
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise FamilyError(f"format_version: expected {FORMAT_VERSION}, got {version}")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise FamilyError(f"{MANIFEST_NAME}: unknown keys {', '.join(unknown)}")
        values["model"] = ModelConfig.from_json(values["model"])
        values["tiers"] = tuple(TierSpec(**t) for t in values["tiers"])
        for name in ("weight_files", "end_token_ids"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


def load_family(folder: Path | str) -> FamilySpec:
    """Read `family.json` of a family folder; raises `FamilyError` naming file and fault."""
    path = Path(folder) / MANIFEST_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FamilyError(f"{folder}: expected a family folder with {MANIFEST_NAME}") from None
    except json.JSONDecodeError as error:
        raise FamilyError(f"{path}: not valid JSON: {error}") from None
    try:
        return FamilySpec.from_json(data)
    except (CheckpointError, KeyError, TypeError) as error:
        raise FamilyError(f"{path}: malformed: {error}") from None
