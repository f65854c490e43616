"""What a TensorRT network may be made of in several ways: attention, the arena's writes, exits.

One way a file: `tensorrt_portable` of native layers, `tensorrt_plugins` of our plugins,
`tensorrt_llm` of that of TensorRT-LLM.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mfs_trt.builder.emitters.tensorrt_layers import Tensor, TensorRtLayers


class Attention(Protocol):
    """One way, for one network. Operations are those of `Emitter`."""

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        group: int,
        index_in_group: int,
        window: int | None,
    ) -> Tensor: ...

    def tier_exit(self, rows: Tensor, tiers: Tensor, gains: Tensor, eps: float) -> Tensor: ...

    def configure(self, settings: Any) -> None:
        """Ask the builder's configuration for what its layers need."""
        ...


AttentionFactory = Callable[[TensorRtLayers], Attention]  # called once a network
