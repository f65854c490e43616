"""BoundInputs: a plan's inputs that keep their memory from step to step.

Handing an array to a plan costs as much as a small operator. An input whose shape stays, as in
decode, is written where the plan reads it already.
"""

from collections.abc import Mapping

import numpy as np
import openvino as ov


class BoundInputs:
    """Of one infer request, which is not to be given other tensors under these names."""

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        inputs = request.get_compiled_model().inputs
        self._places = {name: i for i, port in enumerate(inputs) for name in port.get_names()}
        self._arrays: dict[str, np.ndarray] = {}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Give the plan these values; they are copied."""
        for name, array in arrays.items():
            bound = self._arrays.get(name)
            if bound is None or bound.shape != array.shape or bound.dtype != array.dtype:
                bound = self._arrays[name] = np.array(array, order="C")
                self.bind(name, as_tensor(bound))
            else:
                np.copyto(bound, array)

    def bind(self, name: str, tensor: ov.Tensor) -> None:
        """Let the plan read `tensor` itself, from now on."""
        self._request.set_input_tensor(self._places[name], tensor)


def as_tensor(array: np.ndarray) -> ov.Tensor:
    """OpenVINO's view of the same memory; 16-bit patterns are bfloat16."""
    if array.dtype == np.uint16:
        return ov.Tensor(array, list(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)
