"""Checkpoint → family folder: exits added, dtype cast, one tensor in memory at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from mfs_trt.checkpoint import CheckpointReader
from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.errors import CheckpointError
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, exit_head, exit_norm, tensor_shapes
from mfs_trt.weights.writer import TensorEntry, write_family


def convert_checkpoint(
    reader: CheckpointReader,
    tiers: Sequence[TierSpec],
    folder: Path | str,
    *,
    dtype: str | None = None,
    write_tokenizer: Callable[[Path], object] | None = None,
    end_token_ids: Sequence[int] | None = None,
    force: bool = False,
    on_tensor: Callable[[TensorEntry], None] | None = None,
) -> FamilySpec:
    """Write the family folder of a checkpoint and return its spec.

    Every tier's exit norm starts as the final norm, every own head as the checkpoint's head.
    `dtype` None keeps the checkpoint's; tokenizer and end tokens are the checkpoint's unless given.
    """
    dtype = dtype or reader.dtype
    item_size(dtype)
    return write_family(
        folder,
        reader.config,
        tiers,
        dtype,
        _entries(reader, tiers, dtype),
        end_token_ids=reader.end_token_ids if end_token_ids is None else end_token_ids,
        source=reader.source,
        write_tokenizer=write_tokenizer or reader.write_tokenizer,
        force=force,
        on_tensor=on_tensor,
    )


def _entries(reader: CheckpointReader, tiers: Sequence[TierSpec], dtype: str) -> list[TensorEntry]:
    shapes = tensor_shapes(reader.config)
    head = EMBEDDING if reader.config.tie_word_embeddings else LM_HEAD
    origins = {
        name: name for name in shapes if name != FINAL_NORM
    }  # name in the family → in the source
    for tier in tiers:
        origins[exit_norm(tier.exit_layer)] = FINAL_NORM
        if tier.own_head:
            origins[exit_head(tier.exit_layer)] = head

    def load(origin: str) -> torch.Tensor:
        tensor = reader.load(origin)
        cast = tensor.to(torch_dtype(dtype))
        if dtype == "float16" and tensor.dtype != cast.dtype and not cast.isfinite().all():
            raise CheckpointError(
                f"{origin}: expected values within float16, got up to {tensor.abs().max():.3g}; "
                "bfloat16 or float32 hold them"
            )
        return cast

    return [
        TensorEntry(name, shapes[origin], dtype, partial(load, origin))
        for name, origin in origins.items()
    ]
