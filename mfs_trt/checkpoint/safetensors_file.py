"""One safetensors file: opened lazily, or written tensor by tensor.

Layout: 8 bytes little-endian header length, a JSON header (name → dtype, shape, byte range), then
the tensors. The header needs names, dtypes and shapes only, so a file of any size is written with
one tensor in memory.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from mfs_trt.dtypes import SAFETENSORS_CODES, dtype_name, item_size
from mfs_trt.errors import CheckpointError

TORCH_NAMES = {  # safetensors' dtype codes → torch's names
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class TensorInfo(NamedTuple):
    """What a file's header says about one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name


class SafetensorsFile:
    """A mapped safetensors file. Tensors are views of the mapping while the file stays open."""

    def __init__(self, path: Path):
        """Raises `CheckpointError` when the file is missing, truncated or not safetensors."""
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not safetensors: {error}") from None

    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor's shape and dtype, in the order of the file."""
        infos = {}
        for name in self._file.offset_keys():
            view = self._file.get_slice(name)
            code = str(view.get_dtype())
            infos[name] = TensorInfo(tuple(view.get_shape()), TORCH_NAMES.get(code, code))
        return infos

    def get(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


class SafetensorsWriter:
    """Writes the announced tensors in order, inside a `with` block."""

    def __init__(self, path: Path, entries: Iterable[tuple[str, tuple[int, ...], str]]):
        """`entries`: name, shape and dtype name of every tensor to come, in order."""
        self._entries = list(entries)
        self._next = 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, dtype in self._entries:
            num_bytes = item_size(dtype)
            for size in shape:
                num_bytes *= size
            header[name] = {
                "dtype": SAFETENSORS_CODES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + num_bytes],
            }
            offset += num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> memoryview:
        """Append the next announced tensor; returns its bytes."""
        name, shape, dtype = self._entries[self._next]
        found = (tuple(tensor.shape), dtype_name(tensor.dtype))
        assert found == (shape, dtype), f"{name}: announced {shape} {dtype}, got {found}"
        data = tensor_bytes(tensor)
        self._file.write(data)
        self._next += 1
        return data

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if error_type is None:
            assert self._next == len(self._entries), (
                f"wrote {self._next} of {len(self._entries)} tensors"
            )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes in memory order, without a copy."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
