"""One tier of a family as an ordinary model of its own: fewer layers, its exit as the final one."""

from dataclasses import replace
from pathlib import Path

import torch

from mfs_trt.checkpoint.hf import copy_tokenizer
from mfs_trt.dtypes import item_size, torch_dtype
from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD
from mfs_trt.weights.store import WeightStore


class TierCheckpoint:
    """A `CheckpointReader` over the layers `[0, exit_layer)` of a family folder.

    The tier's norm gain is the final norm. Its head is `lm_head.weight` where it has one of its own
    or the family's is not the embedding; otherwise the model is tied.
    """

    def __init__(self, store: WeightStore, tier: str, dtype: str | None = None) -> None:
        """`dtype` None keeps the family's. Raises `FamilyError` for an unknown tier, `ConfigError`
        for an unknown dtype.
        """
        family = store.spec
        index = family.tier_index(tier)
        self.dtype = dtype or family.dtype
        item_size(self.dtype)
        self.source = f"tier {tier} of {store.folder.name} ({family.source or 'unknown source'})"
        self.end_token_ids = family.end_token_ids
        self._store = store
        head = store.head_name(index)
        self._renamed = {FINAL_NORM: store.norm_name(index), LM_HEAD: head}
        self.config = tier_config(
            family.model, family.tiers[index].exit_layer, is_tied=head == EMBEDDING
        )

    def load(self, name: str) -> torch.Tensor:
        """The tensor in this checkpoint's dtype; raises `CheckpointError` where float16 ends."""
        tensor = self._store.get(self._renamed.get(name, name))
        cast = tensor.to(torch_dtype(self.dtype))
        if self.dtype == "float16" and tensor.dtype != cast.dtype and not cast.isfinite().all():
            raise CheckpointError(
                f"{name}: expected values within float16, got up to {tensor.abs().max():.3g}; "
                "bfloat16 or float32 hold them"
            )
        return cast

    def write_tokenizer(self, folder: Path) -> bool:
        return copy_tokenizer(self._store.folder, folder)


def tier_config(model: ModelConfig, num_layers: int, *, is_tied: bool) -> ModelConfig:
    """`model` cut to its first layers."""
    windowed = tuple(layer for layer in model.windowed_layers if layer < num_layers)
    return replace(
        model,
        num_layers=num_layers,
        tie_word_embeddings=is_tied,
        windowed_layers=windowed,
        sliding_window=model.sliding_window if windowed else None,
    )
