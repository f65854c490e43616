"""One table: what each operator is, and where its parts are."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mfs_trt.plugins import reference


@dataclass(frozen=True)
class Operator:
    """One operator; kernels and plugins are named, so that reading the table imports neither."""

    reference: Callable[..., Any]  # in plain torch: the meaning of the word
    launcher: str  # module:function, the kernels on torch tensors
    plugins: tuple[str, ...]  # TensorRT plugins, in the order in which they are chained
    parity_test: str  # of tests/parity/test_kernels.py
    benchmark: str  # row of perf/gpu/kernels.py


_KERNELS = "mfs_trt.plugins.triton_kernels"
OPERATORS = {
    "paged_attention": Operator(
        reference.paged_attention,
        f"{_KERNELS}.paged_attention:paged_attention",
        ("mfs::paged_attention", "mfs::paged_attention_split", "mfs::merge_splits"),
        "test_paged_attention_equals_its_reference",
        "paged_attention",
    ),
    "kv_write": Operator(
        reference.kv_write,
        f"{_KERNELS}.kv_write:kv_write",
        ("mfs::kv_write",),
        "test_kv_write_equals_its_reference",
        "kv_write",
    ),
    "tier_exit": Operator(
        reference.tier_exit,
        f"{_KERNELS}.tier_exit:tier_exit",
        ("mfs::tier_exit",),
        "test_tier_exit_equals_its_reference",
        "tier_exit",
    ),
    "variant_delta": Operator(
        reference.variant_delta,
        f"{_KERNELS}.variant_delta:variant_delta",
        ("mfs::variant_project", "mfs::variant_delta"),
        "test_variant_delta_equals_its_reference",
        "variant_delta",
    ),
}


def load_launcher(operator: str) -> Callable[..., Any]:
    """The operator's kernels as a function on torch tensors; imports OpenAI Triton."""
    module, function = OPERATORS[operator].launcher.split(":")
    return getattr(import_module(module), function)


def register_plugins() -> None:
    """Make the operators known to TensorRT as `tensorrt.plugin.op.mfs.*`; once a process.

    Raises `ImportError` naming what to install where TensorRT or OpenAI Triton is missing.
    """
    for package, module in (("tensorrt>=10.13", "tensorrt.plugin"), ("triton", "triton")):
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(
                f"plugins need {package} (pip install '{package}'): {error}"
            ) from None
    import_module("mfs_trt.plugins.qdp")  # its import registers
