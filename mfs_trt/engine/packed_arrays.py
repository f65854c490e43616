"""PackedArrays: int32 arrays on the device as views of one buffer, sent in one copy."""

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 64  # int32 numbers: 256 bytes, as of CUDA's own allocations


class PackedArrays:
    """`tensors[name]` on the device; `fill` sends other arrays of the same shapes to the same
    addresses.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], device: torch.device) -> None:
        self._places, size = {}, 0
        for name, array in arrays.items():
            self._places[name] = (size, array.shape)
            size += -(-array.size // _ALIGNMENT) * _ALIGNMENT
        self._host = np.zeros(size, np.int32)
        self._buffer = torch.empty(size, dtype=torch.int32, device=device)
        self.tensors = {
            name: self._buffer[begin : begin + int(np.prod(shape, dtype=np.int64))].view(shape)
            for name, (begin, shape) in self._places.items()
        }
        self.fill(arrays)

    def takes(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether `fill` may send these: the same names and shapes."""
        shapes = {name: shape for name, (_, shape) in self._places.items()}
        return {name: array.shape for name, array in arrays.items()} == shapes

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, (begin, _) in self._places.items():
            array = arrays[name]
            self._host[begin : begin + array.size] = array.ravel()
        self._buffer.copy_(torch.from_numpy(self._host))


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """int32 arrays to the device in one copy: views of one buffer, by name."""
    return PackedArrays(arrays, device).tensors
