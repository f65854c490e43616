"""One GGUF file, mapped: its metadata, its tensor table, and tensors dequantised on demand.

Layout (versions 2 and 3, little-endian): magic, version, counts; metadata as typed key-value pairs;
the tensor table; aligned tensor data. The `gguf` package supplies block sizes and dequantisation;
its reader is not used, as it takes seconds for a vocabulary and does not notice a truncated file.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mfs_trt.errors import CheckpointError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """One row of the tensor table."""

    shape: tuple[int, ...]  # [out, in]: outermost first, the reverse of the file's order
    type_name: str  # ggml's: F32, F16, Q4_1, …
    first_byte: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file: `fields` (key → value) and `tensors` (name → `GgufTensor`)."""

    def __init__(self, path: Path):
        """Raises `CheckpointError` when the file is missing, truncated, or of an unknown kind."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{path}: expected a GGUF file, got magic {self._data[:4]!r}")
        self._position = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError):
            raise CheckpointError(
                f"{path}: truncated or damaged in its header, near byte {self._position}"
            ) from None
        for name, tensor in self.tensors.items():
            end = tensor.first_byte + tensor.num_bytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{path}: truncated: tensor {name} ends at byte {end}, "
                    f"the file has {len(self._data)}"
                )

    def load(self, name: str) -> np.ndarray:
        """A tensor as float32; F16 comes as float16, BF16 as its 16-bit words (uint16)."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.first_byte)
        if tensor.type_name == "F32":
            return raw.view(np.float32).reshape(tensor.shape)
        if tensor.type_name == "F16":
            return raw.view(np.float16).reshape(tensor.shape)
        if tensor.type_name == "BF16":
            return raw.view(np.uint16).reshape(tensor.shape)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, GGMLQuantizationType[tensor.type_name]).reshape(tensor.shape)

    def _read_header(self) -> None:
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path}: expected GGUF version 2 or 3, little-endian, got {version}"
            )
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("<I"))
        table = [self._tensor_row() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {
            name: GgufTensor(shape, type_name, data_start + offset, num_bytes)
            for name, shape, type_name, offset, num_bytes in table
        }

    def _tensor_row(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self._string()
        sizes = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        type_id, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise CheckpointError(f"{self.path}: {name}: unknown ggml type {type_id}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        count = int(np.prod(sizes, dtype=object))
        return name, tuple(reversed(sizes)), kind.name, offset, count // block_size * block_bytes

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        end = self._position + size
        if end > len(self._data):
            raise IndexError(end)
        text = self._data[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: unknown metadata type {kind}")
        element, count = self._scalar("<I"), self._scalar("<Q")
        if element not in _SCALARS:
            return [self._value(element) for _ in range(count)]
        layout = f"<{count}{_SCALARS[element][1]}"
        values = list(struct.unpack_from(layout, self._data, self._position))
        self._position += struct.calcsize(layout)
        return values
