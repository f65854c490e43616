"""Writing a family folder: streamed tensor by tensor, and either there whole or not at all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from mfs_trt.atomic_folder import atomic_folder
from mfs_trt.checkpoint.safetensors_file import SafetensorsWriter
from mfs_trt.family.spec import MANIFEST_NAME, FamilySpec, TierSpec
from mfs_trt.model_config import ModelConfig
from mfs_trt.weights.revision import family_revision

BASE_FILE = "base.safetensors"


class TensorEntry(NamedTuple):
    """One tensor to write. `load` is called once, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], torch.Tensor]


def write_family(
    folder: Path | str,
    model: ModelConfig,
    tiers: Sequence[TierSpec],
    dtype: str,
    tensors: Sequence[TensorEntry],
    *,
    end_token_ids: Sequence[int] = (),
    source: str = "",
    write_tokenizer: Callable[[Path], object] | None = None,
    force: bool = False,
    on_tensor: Callable[[TensorEntry], None] | None = None,
) -> FamilySpec:
    """Write a family folder and return its spec, revision included.

    `tensors` must be what `FamilySpec.tensor_shapes` names. `write_tokenizer(folder)` adds the
    tokenizer's files; `on_tensor(entry)` is called after each tensor. An existing family is
    replaced only with `force`, anything else that is there never (`ConfigError`). After any error
    the target is as it was.
    """
    spec = FamilySpec(
        model=model,
        tiers=tuple(tiers),
        revision="",
        weight_files=(BASE_FILE,),
        dtype=dtype,
        end_token_ids=tuple(end_token_ids),
        source=source,
    )
    expected = {name: (shape, dtype) for name, shape in spec.tensor_shapes().items()}
    given = {entry.name: (entry.shape, entry.dtype) for entry in tensors}
    assert given == expected, f"tensors: expected {expected}, got {given}"
    with atomic_folder(Path(folder), MANIFEST_NAME, force) as draft:
        digests = {}
        header = [(entry.name, entry.shape, entry.dtype) for entry in tensors]
        with SafetensorsWriter(draft / BASE_FILE, header) as out:
            for entry in tensors:
                digests[entry.name] = sha256(out.write(entry.load())).hexdigest()
                if on_tensor is not None:
                    on_tensor(entry)
        if write_tokenizer is not None:
            write_tokenizer(draft)
        spec = replace(spec, revision=family_revision(model, tiers, dtype, digests))
        text = json.dumps(spec.to_json(), indent=2) + "\n"
        (draft / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return spec
