"""Paged attention in OpenVINO plans: a stand-in that files can hold, and the operator that runs.

OpenVINO's operator cannot be read back from a file and its signature changes between versions. A
plan holds `PagedAttentionCall` in its place; loading puts the installed version's operator there.
"""

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op import _PagedAttentionExtension

from mfs_trt.errors import EngineError

OPENVINO_VERSION = "2026.4.1"  # whose operator has the inputs below
BLOCK_SIZE = 32  # tokens per block: the only one that the CPU plugin takes


class PagedAttentionCall(ov.Op):
    """Stand-in: query [num_rows, heads * d] in, the attended values of the same shape out.

    Inputs: query, key, value, key cache, value cache, past_lens, subsequence_begins, block_indices,
    block_indices_begins, scale, sliding window (0: none), max_context_len.
    """

    NUM_INPUTS = 12
    class_type_info = ov.DiscreteTypeInfo("PagedAttentionCall", "mfs")

    def __init__(self, inputs: Sequence[ov.Output] | None = None) -> None:
        super().__init__(self)
        if inputs is not None:
            self.set_arguments(list(inputs))
            self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs: Sequence[ov.Output]) -> "PagedAttentionCall":
        return PagedAttentionCall(new_inputs)

    def get_type_info(self) -> ov.DiscreteTypeInfo:
        return PagedAttentionCall.class_type_info


def reading_core() -> ov.Core:
    """A core that knows the stand-in."""
    core = ov.Core()
    core.add_extension(ov.OpExtension(PagedAttentionCall))
    return core


def put_operator(model: ov.Model) -> None:
    """Replace every stand-in of `model` by OpenVINO's operator.

    Raises `EngineError` if the installed version's takes other inputs.
    """
    for node in model.get_ops():
        if node.get_type_name() != "PagedAttentionCall":
            continue
        attention = _operator(node.input_values())
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(attention)
    model.validate_nodes_and_infer_types()


def _operator(call: list[ov.Output]) -> ov.Output:
    *front, scale, window, max_context_len = call
    ints, floats = op.constant(np.zeros(0, np.int32)), op.constant(np.zeros(0, np.float32))
    zero = op.constant(np.int32(0))
    inputs = [
        *front,
        scale,
        window,
        floats,  # ALiBi slopes
        max_context_len,
        *(ints, ints, ints, floats, floats, zero, zero),  # scores, rotation of evicted blocks
        op.constant(np.zeros((0, 0, 0, 0), np.float32)),
        *(zero, ints, ints, ints, ints),  # sparse attention, adaptive eviction
        op.constant(np.zeros(0, np.uint8)),
        ints,
    ]
    try:
        node = _PagedAttentionExtension(
            [i.output(0) if isinstance(i, ov.Node) else i for i in inputs]
        )
    except RuntimeError as error:
        raise EngineError(
            f"openvino {ov.__version__}: its paged-attention operator is not that of "
            f"{OPENVINO_VERSION}: {str(error).strip().splitlines()[-1]}"
        ) from None
    _, num_kv_heads, _, head_dim = call[3].get_partial_shape()
    info = node.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = num_kv_heads.get_length()
    info["k_head_size"] = info["v_head_size"] = head_dim.get_length()
    return node.output(0)  # the others, scores and the like, are not asked for
