"""EngineManifest: what an engine folder holds and was built from; the content of `engine.json`."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mfs_trt.dtypes import item_size
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec, load_family

FORMAT_VERSION = 1
MANIFEST_NAME = "engine.json"


@dataclass(frozen=True)
class PlanFile:
    """A plan's files in the engine folder, with their SHA-256."""

    name: str  # segment_0, head_0, …
    files: dict[str, str]  # file name → digest; the first one is the plan itself

    def check(self, folder: Path) -> Path:
        """Path of the plan; raises `EngineError` when a file is missing or not the built one."""
        for name, digest in self.files.items():
            path = folder / name
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                raise EngineError(f"{path}: missing; build the engine again") from None
            if found != digest:
                raise EngineError(
                    f"{path}: truncated or corrupt: expected SHA-256 {digest[:12]}, "
                    f"got {found[:12]}; build the engine again"
                )
        return folder / next(iter(self.files))


@dataclass(frozen=True)
class EngineManifest:
    """Settings of one build. Weights stay in the family folder, named by path and revision."""

    target: str  # reference, openvino, …
    family: str  # path of the family folder
    family_revision: str
    dtype: str  # computation and KV dtype: float32, bfloat16, float64
    block_size: int  # tokens per block
    memory_nbytes: int  # of the KV arena
    limits: EngineLimits
    kv_dtype: str = ""  # float32, bfloat16, uint8; the same as dtype when empty
    weight_format: str = ""  # int8, int4, fp8; dtype when empty
    attention: str = ""  # how TensorRT plans attend: portable, plugin, gpt_attention
    backend_version: str = ""  # of the library that runs the plans
    plans: tuple[PlanFile, ...] = ()
    compute_capabilities: tuple[str, ...] = ()  # GPUs that the plans are for, as sm86; any if empty
    tensor_parallel_size: int = 1  # GPUs that share every layer

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise EngineError(
                f"tensor_parallel_size: expected 1, the only one that this version builds and "
                f"runs, got {self.tensor_parallel_size}"
            )

    def save(self, folder: Path) -> None:
        """Write `engine.json` atomically."""
        temporary = folder / f".{MANIFEST_NAME}.tmp"
        data = {"format_version": FORMAT_VERSION, **asdict(self)}
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / MANIFEST_NAME)

    @classmethod
    def load(cls, folder: Path | str) -> "EngineManifest":
        """Read `engine.json`; raises `EngineError` naming file and fault."""
        path = Path(folder) / MANIFEST_NAME
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise EngineError(f"{folder}: expected an engine folder with {MANIFEST_NAME}") from None
        except ValueError as error:  # bad JSON or bad UTF-8
            raise EngineError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise EngineError(f"{path}: expected a JSON object, got {data!r}")
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise EngineError(f"{path}: format_version: expected {FORMAT_VERSION}, got {version}")
        try:
            limits = EngineLimits(**data.pop("limits"))
            plans = tuple(PlanFile(**plan) for plan in data.pop("plans"))
            data["compute_capabilities"] = tuple(data.get("compute_capabilities", ()))
            return cls(limits=limits, plans=plans, **data)
        except (KeyError, TypeError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise EngineError(f"{path}: malformed: {error}; expected the keys {known}") from None

    def plan(self, name: str) -> PlanFile:
        """The plan called `name`; raises `EngineError` when the folder has none."""
        for plan in self.plans:
            if plan.name == name:
                return plan
        known = ", ".join(p.name for p in self.plans) or "none"
        raise EngineError(f"plans: expected one called {name}, got {known}")

    def load_family(self) -> FamilySpec:
        """The family it was built from; raises `EngineError` when that has changed since."""
        spec = load_family(self.family)
        if spec.revision != self.family_revision:
            raise EngineError(
                f"{self.family}: family revision {spec.revision[:12]} is not the "
                f"{self.family_revision[:12]} that the engine was built from; build it again"
            )
        return spec

    def layer_nbytes(self, family: FamilySpec, itemsize: int) -> int:
        """Bytes of one layer's keys and values in one frame, as plain numbers of `itemsize`."""
        model = family.model
        return 2 * model.num_kv_heads * self.block_size * model.head_dim * itemsize

    def kv_spec(self, family: FamilySpec, layer_nbytes: int) -> KVCacheSpec:
        """Sizes of the arena that `memory_nbytes` allow; a frame takes `layer_nbytes` a layer.

        Each boundary's feature pool holds as many tokens as the frames do at the top tier, in the
        dtype of hidden states, where there is room for one block of each segment beside it. Raises
        `EngineError` when the memory is less than one block of every segment.
        """
        one = KVCacheSpec(
            group_size=family.group_size,
            groups_per_segment=family.groups_per_segment,
            num_kv_heads=family.model.num_kv_heads,
            head_dim=family.model.head_dim,
            block_size=self.block_size,
            layer_nbytes=layer_nbytes,
            num_frames=1,
        )
        groups = sum(family.groups_per_segment)
        num_frames = self.memory_nbytes // one.frame_nbytes
        if num_frames < 1 + groups:
            raise EngineError(
                f"memory: expected at least {(1 + groups) * one.frame_nbytes} bytes for one block "
                f"of every segment ({1 + groups} frames of {one.frame_nbytes}), "
                f"got {self.memory_nbytes}"
            )
        num_boundaries = len(family.tiers) - 1
        row_nbytes = family.model.hidden_size * item_size(self.dtype)
        feature_nbytes = num_boundaries * self.block_size * row_nbytes
        num_blocks = self.memory_nbytes // (groups * one.frame_nbytes + feature_nbytes)
        with_features = (self.memory_nbytes - (num_blocks + 1) * feature_nbytes) // one.frame_nbytes
        num_slots = 0
        if num_boundaries and with_features >= 1 + groups:
            num_frames, num_slots = with_features, (num_blocks + 1) * self.block_size
        sizes = {"num_frames": num_frames, "num_feature_slots": num_slots}
        return KVCacheSpec(**{**asdict(one), **sizes})
