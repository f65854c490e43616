"""mfs-trt: a whole LLM family served as one nested model.

`LLM` and `SamplingParams` are the offline API; everything else is imported from where it lives.
"""

from typing import TYPE_CHECKING, Any

from mfs_trt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mfs_trt.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` on first use: it brings the tokenizer library, which host logic does without."""
    if name == "LLM":
        from mfs_trt.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
