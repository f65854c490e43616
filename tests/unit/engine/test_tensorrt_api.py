"""The module behind a TensorRT target: what it can do is known, what is missing is named."""

import gc
import sys
from types import SimpleNamespace

import pytest

from mfs_trt.engine.tensorrt_api import TensorRtApi, load_api
from mfs_trt.errors import EngineError


def full_network():
    names = ("add_attention_v2", "add_kv_cache_update", "add_rotary_embedding")
    return SimpleNamespace(**dict.fromkeys(names))


def test_rtx_builds_for_gpus_that_are_not_here_and_keeps_compiled_kernels():
    api = load_api("tensorrt-rtx")
    expected = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
    assert api.compute_capabilities == expected
    assert api.has_runtime_cache
    assert api.version == "1.7.1.116"


def test_full_tensorrt_builds_for_the_gpu_of_the_machine(monkeypatch):
    module = SimpleNamespace(INetworkDefinition=full_network(), __version__="11.1.0")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    api = load_api("tensorrt")
    assert api.module is module and api.version == "11.1.0"
    assert api.compute_capabilities == () and not api.has_runtime_cache


@pytest.mark.parametrize(
    ("target", "modules", "install"),
    [
        ("tensorrt", ["tensorrt"], "tensorrt_cu13>=11.1"),
        ("tensorrt-rtx", ["tensorrt_rtx_bindings", "tensorrt_rtx"], r"mfs-trt\[trt-rtx\]"),
    ],
)
def test_module_that_is_missing_is_named_with_what_to_install(
    monkeypatch, target, modules, install
):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        EngineError, match=f"^target {target}: cannot import {modules[0]} .*{install}"
    ):
        load_api(target)


def test_library_that_does_not_load_is_named_with_its_reason(monkeypatch, tmp_path):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11:\\n not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(EngineError, match=r": libnvinfer\.so\.11: not found$"):
        load_api("tensorrt")


def test_module_without_the_needed_layers_is_refused_by_version(monkeypatch):
    module = SimpleNamespace(
        __name__="tensorrt",
        __version__="10.3.0",
        INetworkDefinition=SimpleNamespace(add_attention_v2=None),
    )
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    message = "tensorrt 10.3.0 has no add_kv_cache_update, add_rotary_embedding; expected a newer"
    with pytest.raises(EngineError, match=message):
        load_api("tensorrt")


def test_reports_of_the_library_are_kept_in_one_line():
    api = load_api("tensorrt-rtx")
    assert api.last_error() == "no reason given"
    logger = api.new_logger()
    logger.log(api.module.ILogger.ERROR, "first\n second")
    logger.log(api.module.ILogger.WARNING, "a warning")
    assert api.last_error() == "first second"


def test_no_garbage_is_collected_while_the_library_makes_an_object():
    """A builder that is collected in a logger waits for the lock that its caller holds."""
    logger = load_api("tensorrt-rtx").module.ILogger
    seen = []
    module = SimpleNamespace(Builder=lambda logger: seen.append(gc.isenabled()), ILogger=logger)
    TensorRtApi("tensorrt", module).create("Builder")
    assert seen == [False] and gc.isenabled()


def test_library_that_gives_no_builder_is_named_with_its_report():
    rtx = load_api("tensorrt-rtx").module

    def no_builder(logger):
        logger.log(rtx.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    module = SimpleNamespace(Builder=no_builder, ILogger=rtx.ILogger, __version__="11.4.0")
    message = "^target tensorrt: 11.4.0 gives no Builder: CUDA initialization failure .*: 35$"
    with pytest.raises(EngineError, match=message):
        TensorRtApi("tensorrt", module).create("Builder")
