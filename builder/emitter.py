"""Emitter: what a backend must be able to express so that `network` can describe a model to it.

One method an operation; tensors are the backend's own handles. Rows are packed: `num_rows` tokens
of a segment.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

Tensor = TypeVar("Tensor")


class Emitter(Protocol[Tensor]):
    """Builds one plan. Shapes use -1 for what is known only at run time."""

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A plan input. dtype: `int32`, or `activation` for the plan's own floating type."""
        ...

    def output(self, name: str, tensor: Tensor) -> None:
        """A plan output."""
        ...

    def weight(self, name: str) -> Tensor:
        """A tensor of the family folder, as a constant."""
        ...

    def table(self, values: np.ndarray) -> Tensor:
        """A constant in full precision, as a table of cosines."""
        ...

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a family tensor [n, width], ids [num_rows] int32 → [num_rows, width].

        A backend may leave the tensor out of the plan and take it as an input of that name.
        """
        ...

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """table [n, width], rows [num_rows] int32 → [num_rows, width]."""
        ...

    def source_rows(self, below: Tensor, features: Tensor, rows: Tensor) -> Tensor:
        """Row r ≥ 0 of `below`, or feature slot -1 - r. → [num_rows, hidden]."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_rows, in] · weight [out, in]ᵀ + bias [out]."""
        ...

    def linears(self, x: Tensor, names: Sequence[str], has_bias: bool) -> list[Tensor]:
        """`linear` of one input with each `{name}.weight` and, if there are any, `{name}.bias`.

        A backend may run them as one product.
        """
        ...

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Over the last dimension, in full precision."""
        ...

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[num_rows, num_heads * d] → [num_rows, num_heads, d]."""
        ...

    def merge_heads(self, x: Tensor) -> Tensor:
        """[num_rows, num_heads, d] → [num_rows, num_heads * d]."""
        ...

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_rows, num_heads, d], cos and sin [num_rows, d/2]: pairs (i, i + d/2)."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        group: int,
        index_in_group: int,
        window: int | None,
    ) -> Tensor:
        """Write key and value to the arena, attend causally over each request's blocks.

        query [num_rows, heads * d]; key, value [num_rows, kv_heads * d]. The arena tensors are
        those of `index_in_group`, the block table that of layer group `group`.
        → [num_rows, heads * d].
        """
        ...

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor:
        """Rows that leave the model, normalised with the gain of their tier.

        rows [num_rows, hidden], tiers [num_exits] int32, gains [num_tiers, hidden] → [num_exits,
        hidden]. A backend whose rows are more than the exits reads which they are.
        """
        ...

    def swiglu(self, x: Tensor, gate: str, up: str, has_bias: bool) -> Tensor:
        """silu(gate) * up, each the `linear` of x that is named, as in `linears`."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor: ...
