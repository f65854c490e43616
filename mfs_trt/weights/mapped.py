"""Single tensors of a family folder as mapped numpy arrays: no byte is read before its use."""

import json
from pathlib import Path

import numpy as np

from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import FamilySpec

# numpy has no bfloat16: its bits
_NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def map_tensor(folder: Path | str, family: FamilySpec, name: str) -> np.ndarray:
    """Tensor `name` in its stored dtype (bfloat16 as uint16 bits), mapped copy-on-write.

    Raises `FamilyError` when no weight file of the folder holds it, or one cannot be read.
    """
    for file_name in family.weight_files:
        path = Path(folder) / file_name
        try:
            tensor = _map_from(path, name)
        except (OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise FamilyError(f"{path}: missing, truncated or corrupt: {error}") from None
        if tensor is not None:
            return tensor
    raise FamilyError(f"{folder}: no tensor named {name!r}")


def _map_from(path: Path, name: str) -> np.ndarray | None:
    """The tensor of one safetensors file, where it has it."""
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_nbytes))
    if name not in header:
        return None
    entry = header[name]
    offset = 8 + header_nbytes + entry["data_offsets"][0]
    dtype = _NUMPY_TYPES[entry["dtype"]]
    return np.memmap(path, dtype, "c", offset, tuple(entry["shape"]))


def to_float32(array: np.ndarray) -> np.ndarray:
    """A copy in float32 of what `map_tensor` returned."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
