"""Plans of an OpenVINO engine folder: checked, read from mapped files and compiled for this CPU."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from mfs_trt.engine.huge_pages import use_huge_pages
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.mapped_pages import release_pages
from mfs_trt.engine.openvino_attention import put_operator, reading_core
from mfs_trt.engine.threads import choose_num_threads
from mfs_trt.errors import EngineError
from mfs_trt.family.spec import FamilySpec

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
KV_PRECISIONS = {**PRECISIONS, "uint8": "u8"}


# numpy has no bfloat16: its bits
_NUMPY_TYPES = {"f32": np.float32, "bf16": np.uint16, "u8": np.uint8}


@dataclass(frozen=True)
class ArenaTensor:
    """One layer's keys or values, [num_frames, kv_heads, …], and OpenVINO's view of them."""

    array: np.ndarray
    bound: ov.Tensor


@dataclass(frozen=True)
class CompiledPlans:
    """`segments[s]` and `heads[weight name]`."""

    segments: tuple[ov.CompiledModel, ...]
    heads: dict[str, ov.CompiledModel]

    def new_cache(self, kind: str, num_frames: int) -> ArenaTensor:
        """`key_cache` or `value_cache` of one layer, in the layout that compilation chose."""
        port = self.segments[0].input(f"{kind}.0.0")
        shape = [num_frames, *(d.get_length() for d in list(port.partial_shape)[1:])]
        array = np.zeros(shape, _NUMPY_TYPES[port.element_type.get_type_name()])
        return ArenaTensor(array, ov.Tensor(array, shape, port.element_type))

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's keys and values in one frame, scales of 8-bit caches included."""
        return sum(self.new_cache(kind, 1).array.nbytes for kind in ("key_cache", "value_cache"))


def compile_plans(folder: Path, manifest: EngineManifest, family: FamilySpec) -> CompiledPlans:
    """Raises `EngineError` naming file or version and both sides of a mismatch."""
    if ov.__version__ != manifest.backend_version:
        raise EngineError(
            f"{folder}: built with openvino {manifest.backend_version}, found {ov.__version__}: "
            "build it again, or install that version"
        )
    core = reading_core()
    capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if manifest.dtype == "bfloat16" and "BF16" not in capabilities:
        raise EngineError(
            f"{folder}: built for dtype bfloat16, expected float32: OpenVINO computes in "
            f"{', '.join(capabilities)} on this CPU"
        )
    options = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[manifest.dtype],
        "KV_CACHE_PRECISION": KV_PRECISIONS[manifest.kv_dtype or manifest.dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": choose_num_threads(),
    }

    def compiled(name: str) -> ov.CompiledModel:
        path = folder / manifest.plan(name).check(folder)
        try:
            model = core.read_model(path)
            put_operator(model)
            _mark_bf16(model)
            plan = core.compile_model(model, "CPU", options)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineError(f"{path}: OpenVINO cannot load this plan: {reason}") from None
        release_pages(
            path.with_suffix(".bin").resolve()
        )  # the plan has its weights in its own layout
        return plan

    heads = {family.head_name(tier): "" for tier in range(len(family.tiers))}
    plans = CompiledPlans(
        tuple(compiled(f"segment_{s.index}") for s in family.segments),
        {name: compiled(f"head_{i}") for i, name in enumerate(heads)},
    )
    use_huge_pages()
    return plans


def _mark_bf16(model: ov.Model) -> None:
    """What OpenVINO would raise to fp32 by itself stays in bf16.

    Weights stored in bf16 are multiplied as they are, not folded into fp32 ones. And sums that lead
    to an output without a multiplication, the whole residual stream, are computed in bf16 where
    computation is in bf16, not converted there and back in every layer.
    """
    for node in model.get_ops():
        kind = node.get_type_name()
        if kind == "Add":
            node.get_rt_info()["enforceBF16evenForGraphTail"] = "true"
        elif kind == "Convert":
            source = node.input_value(0)
            is_weight = source.get_node().get_type_name() == "Constant"
            if is_weight and source.get_element_type() == ov.Type.bf16:
                node.get_rt_info()["decompression_0"] = True
