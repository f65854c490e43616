"""A family with more exits over the same weights: the base linked, the new gains beside it."""

import json
from collections.abc import Collection
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from mfs_trt.atomic_folder import atomic_folder
from mfs_trt.checkpoint.safetensors_file import SafetensorsWriter
from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import MANIFEST_NAME, FamilySpec, TierSpec
from mfs_trt.tensor_names import exit_norm
from mfs_trt.weights.store import WeightStore

ADDED_FILE = "added_exits.safetensors"


def add_exits(store: WeightStore, exit_layers: Collection[int], folder: Path | str) -> FamilySpec:
    """Write a family folder with the tiers of `store` and one `layer<n>` after each other layer.

    A new exit has the top tier's norm gain and the shared head. The folder links to the store's
    weight files and lives no longer than they do; it has no tokenizer. Raises `FamilyError` for an
    exit beyond the model, `ConfigError` when `folder` exists.
    """
    spec = store.spec
    known = {tier.exit_layer for tier in spec.tiers}
    new = sorted(set(exit_layers) - known)
    if new and not 1 <= new[0] <= new[-1] <= spec.model.num_layers:
        raise FamilyError(f"exits: expected layers 1 to {spec.model.num_layers}, got {new}")
    tiers = [*spec.tiers, *(TierSpec(f"layer{layer}", layer) for layer in new)]
    digest = sha256(repr((spec.revision, new)).encode()).hexdigest()
    added = replace(
        spec,
        tiers=tuple(sorted(tiers, key=lambda tier: tier.exit_layer)),
        weight_files=(*spec.weight_files, ADDED_FILE),
        revision=digest,
    )
    gain = store.get(spec.norm_name(len(spec.tiers) - 1))
    with atomic_folder(Path(folder), marker=None, force=False) as draft:
        for name in spec.weight_files:
            (draft / name).symlink_to((store.folder / name).resolve())
        header = [(exit_norm(layer), tuple(gain.shape), spec.dtype) for layer in new]
        with SafetensorsWriter(draft / ADDED_FILE, header) as out:
            for _ in new:
                out.write(gain)
        text = json.dumps(added.to_json(), indent=2) + "\n"
        (draft / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return added
