"""Weight dtypes by name: one table from our names to safetensors' codes and sizes."""

from typing import TYPE_CHECKING

from mfs_trt.errors import ConfigError

if TYPE_CHECKING:
    import torch

SAFETENSORS_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes per element


def item_size(name: str) -> int:
    """Bytes per element; raises `ConfigError` for a name that weights are never stored in."""
    if name not in ITEM_SIZES:
        raise ConfigError(f"dtype: expected one of {', '.join(ITEM_SIZES)}, got {name!r}")
    return ITEM_SIZES[name]


def torch_dtype(name: str) -> "torch.dtype":
    """torch's dtype of that name; raises `ConfigError` as `item_size` does."""
    import torch

    item_size(name)
    return getattr(torch, name)


def dtype_name(dtype: "torch.dtype") -> str:
    """Our name of a torch dtype, which is torch's own without the prefix."""
    return str(dtype).removeprefix("torch.")
