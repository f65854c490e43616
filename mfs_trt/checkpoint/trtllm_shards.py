"""How TensorRT-LLM cuts one tensor into tensor-parallel ranks, in both directions.

attention.qkv of rank r:   | q heads of r | k heads of r | v heads of r |      rows
fewer KV heads than ranks: a KV head is repeated on neighbouring ranks
"""

from collections.abc import Sequence

import torch

from mfs_trt.checkpoint.names import trtllm_name
from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import EMBEDDING, LM_HEAD, tensor_shapes

_SPLIT_ROWS = (
    "mlp.gate_proj.weight",
    "mlp.gate_proj.bias",
    "mlp.up_proj.weight",
    "mlp.up_proj.bias",
)
_SPLIT_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_QKV = ("q", "k", "v")


class Shards:
    """The cuts of one model for `tp_size` ranks. Names are ours; every rank has the same shapes."""

    def __init__(self, config: ModelConfig, tp_size: int, embedding_dim: int | None):
        """`embedding_dim`: the axis that the embedding is cut along, None for a copy on every rank.

        Raises `CheckpointError` when `tp_size` does not divide heads or widths.
        """
        self._tp_size = tp_size
        self._embedding_dim = embedding_dim if tp_size > 1 else None
        self._shapes = tensor_shapes(config)
        self._shapes[LM_HEAD] = self._shapes[EMBEDDING]
        self._head_dim = config.head_dim
        kv_heads = config.num_kv_heads
        self._kv_repeats = max(1, tp_size // kv_heads)  # ranks that share one KV head
        divisible = {
            "num_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
            "num_kv_heads": kv_heads * self._kv_repeats,
        }
        for name, size in divisible.items():
            if tp_size < 1 or size % tp_size:
                raise CheckpointError(f"tp {tp_size}: does not divide the model's {name} {size}")
        self._q_rows = config.num_heads // tp_size * config.head_dim
        self._kv_rows = kv_heads * self._kv_repeats // tp_size * config.head_dim

    def pieces(self, stored: str) -> list[str]:
        """Our tensors that lie in the rank's tensor `stored`, in order."""
        return [name for name in self._shapes if trtllm_name(name) == stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the rank's tensor that holds `name`."""
        shape = self._shapes[name]
        dim = self._cut(name)
        if _qkv_part(name) is not None:
            return (self._q_rows + 2 * self._kv_rows, *shape[1:])
        if dim is None:
            return shape
        per_rank = -(-shape[dim] // self._tp_size)
        return (*shape[:dim], per_rank, *shape[dim + 1 :])

    def split(self, name: str, whole: torch.Tensor, *, rank: int) -> torch.Tensor:
        """The part of `whole` that lies on `rank`, padded with zeros where the vocabulary ends."""
        part = _qkv_part(name)
        if part is not None:
            if part == "q":
                return whole[rank * self._q_rows : (rank + 1) * self._q_rows]
            first = rank // self._kv_repeats * self._kv_rows
            return whole[first : first + self._kv_rows]
        dim = self._cut(name)
        if dim is None:
            return whole
        size = self.shape(name)[dim]
        first = min(rank * size, whole.shape[dim])
        taken = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
        missing = size - taken.shape[dim]
        if missing:
            padding = taken.new_zeros((missing, *taken.shape[1:]))
            taken = torch.cat([taken, padding], dim=dim)
        return taken.contiguous()

    def merge(self, name: str, ranks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from what lies on each rank, padding trimmed."""
        shape = self._shapes[name]
        part = _qkv_part(name)
        if part is not None:
            first = {"q": 0, "k": self._q_rows, "v": self._q_rows + self._kv_rows}[part]
            rows = self._q_rows if part == "q" else self._kv_rows
            step = 1 if part == "q" else self._kv_repeats
            return _joined([rank[first : first + rows] for rank in ranks[::step]], 0)
        dim = self._cut(name)
        if dim is None:
            return ranks[0][: shape[0]]
        return _joined(ranks, dim)[: shape[0]]

    def _cut(self, name: str) -> int | None:
        """The axis that `name` is cut along; None where every rank has a copy."""
        if name == EMBEDDING:
            return self._embedding_dim
        if name == LM_HEAD or name.endswith(_SPLIT_ROWS):
            return 0
        return 1 if name.endswith(_SPLIT_COLUMNS) else None


def _qkv_part(name: str) -> str | None:
    for part in _QKV:
        if f".self_attn.{part}_proj." in name:
            return part
    return None


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
