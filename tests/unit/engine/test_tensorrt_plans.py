"""Loading a TensorRT engine folder: what does not fit is named, with both sides, in one line.

Plans run through addresses here by a stand-in for the library's runtime that evaluates the network
on the CPU.
"""

import ctypes
import re
import shutil
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mfs_trt.engine import load_engine, tensorrt_plans
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.packed_arrays import upload
from mfs_trt.engine.tensorrt_api import load_api
from mfs_trt.engine.tensorrt_plans import DECODE, PREFILL, TensorRtPlan, check_gpu, load_plans
from mfs_trt.errors import EngineError
from run_recorder import RunRecorder
from tensorrt_evaluator import EvaluatedPlan
from tensorrt_rig import describe_networks, rtx_config
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

FAMILY = folder_family((1, 2))


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", FAMILY)


@pytest.fixture
def folder(family, tmp_path) -> Path:
    """An engine folder whose plans are not TensorRT's: nothing here gets as far as to read them."""
    folder = build_tiny_engine(family, tmp_path / "engine", "reference")
    manifest = EngineManifest.load(folder)
    replace(manifest, target="tensorrt-rtx", backend_version="1.7.1.116").save(folder)
    return folder


def refusal(folder: Path) -> str:
    """The message with which the engine folder is refused."""
    with pytest.raises(EngineError) as caught:
        load_engine(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- refusals ------------------------------------------------------------------------------------


def test_engine_built_by_another_version_is_refused_with_both_versions(folder):
    replace(EngineManifest.load(folder), backend_version="1.4.0.9").save(folder)
    message = refusal(folder)
    assert message.startswith(f"{folder}: built with tensorrt-rtx 1.4.0.9, found 1.7.1.116")


def test_family_that_has_changed_is_refused_with_both_revisions(folder):
    replace(EngineManifest.load(folder), family_revision="other").save(folder)
    assert re.search("family revision .* is not the other that", refusal(folder))


def test_torch_without_cuda_is_named(folder, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(folder) == (
        f"{folder}: target tensorrt-rtx needs a torch with CUDA, found {torch.__version__}"
    )


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H100, as far as torch can tell."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def test_machine_without_a_gpu_is_named(folder, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "target tensorrt-rtx needs an NVIDIA GPU and its driver, found none"
    assert refusal(folder) == f"{folder}: {message}"


def test_plans_for_other_gpus_are_refused_with_both_sides(folder, gpu):
    replace(EngineManifest.load(folder), compute_capabilities=("sm86", "sm120")).save(folder)
    assert "built for sm86, sm120, found NVIDIA H100 (sm90): build it again" in refusal(folder)


@pytest.mark.parametrize("built_for", [(), ("sm80", "sm90")])
def test_plans_for_this_gpu_pass(folder, gpu, built_for):
    check_gpu(folder, replace(EngineManifest.load(folder), compute_capabilities=built_for))


def test_plan_that_is_not_the_built_one_is_refused(folder, family, gpu):
    manifest = EngineManifest.load(folder)
    with pytest.raises(EngineError, match="plans: expected one called segment_0"):
        load_plans(folder, manifest, FAMILY)


def test_plan_that_the_library_finds_invalid_is_refused(gpu, tmp_path):
    api = load_api("tensorrt-rtx")
    invalid = (api.module.EngineValidity.INVALID, 0)
    runtime = SimpleNamespace(get_engine_validity=lambda content: invalid)
    (tmp_path / "segment_0.plan").write_bytes(b"x")
    message = r"segment_0.plan: not valid for NVIDIA H100 with tensorrt-rtx 1\.7.* build it again"
    with pytest.raises(EngineError, match=message):
        TensorRtPlan(api, runtime, tmp_path / "segment_0.plan")


# -- running -------------------------------------------------------------------------------------


class Runtime:
    """Loads `networks[content of the plan file]`; what is here is what the library's promises."""

    def __init__(self, trt, networks) -> None:
        self._trt, self._networks = trt, networks

    def deserialize_cuda_engine(self, content: bytes):
        return CudaEngine(self._trt, EvaluatedPlan(self._networks[content]))


class CudaEngine:
    num_optimization_profiles = 2

    def __init__(self, trt, plan: EvaluatedPlan) -> None:
        self._trt, self._plan = trt, plan
        self._names = [*plan.inputs, *plan.outputs]
        self.num_io_tensors, self.contexts = len(self._names), []

    def get_tensor_name(self, i):
        return self._names[i]

    def get_tensor_mode(self, name):
        modes = self._trt.TensorIOMode
        return modes.OUTPUT if name in self._plan.outputs else modes.INPUT

    def get_tensor_dtype(self, name):
        return self._trt.DataType.FLOAT

    def get_device_memory_size_for_profile_v2(self, profile):
        return 100 + profile

    def create_runtime_config(self):
        cache = SimpleNamespace(serialize=lambda: b"kernels", deserialize=lambda content: True)
        config = SimpleNamespace(create_runtime_cache=lambda: cache, strategy=None)
        config.set_runtime_cache = lambda cache: True
        config.dynamic_shapes_kernel_specialization_strategy = None
        config.set_execution_context_allocation_strategy = partial(setattr, config, "strategy")
        return config

    def create_execution_context(self, config):
        self.contexts.append(Context(self._plan))
        self.contexts[-1].config = config
        return self.contexts[-1]


class Context:
    """Reads and writes memory at the addresses that it was given."""

    def __init__(self, plan: EvaluatedPlan) -> None:
        self._plan, self._shapes, self._addresses = plan, {}, {}
        self.profile, self.memory, self.is_capturable = 0, None, True

    def set_device_memory(self, address, nbytes):
        self.memory = (address, nbytes)

    def is_stream_capturable(self, stream):
        return self.is_capturable

    def set_optimization_profile_async(self, profile, stream):
        self.profile = profile
        return True

    def set_input_shape(self, name, shape):
        _, declared = self._plan.inputs[name]
        is_taken = all(a in (-1, b) for a, b in zip(declared, shape, strict=True))
        if is_taken:
            self._shapes[name] = shape
        return is_taken

    def set_tensor_address(self, name, address):
        self._addresses[name] = address

    def get_tensor_shape(self, name):
        (rows,) = {s[0] for n, s in self._shapes.items() if n in ("input_ids", "exit_rows")}
        return (rows, self._plan.outputs[name][1][1])

    def execute_async_v3(self, stream):
        self._plan.bind({})
        inputs = {
            name: self._tensor(name, dtype, self._shapes[name])
            for name, (dtype, _) in self._plan.inputs.items()
        }
        for name in self._plan.outputs:
            if name.startswith("new_"):
                assert self._addresses[name] == self._addresses[name.removeprefix("new_")]
                self._plan.bind({name: inputs[name.removeprefix("new_")]})
        result = self._plan.run(inputs, self.profile)
        (name,) = [n for n in self._plan.outputs if not n.startswith("new_")]
        self._tensor(name, result.dtype, result.shape).copy_(result)
        return True

    def _tensor(self, name, dtype, shape):
        nbytes = prod(shape) * dtype.itemsize
        memory = (ctypes.c_byte * nbytes).from_address(self._addresses[name])
        return torch.frombuffer(memory, dtype=dtype).view(shape)


@pytest.fixture
def loaded(family, tmp_path, gpu):
    """A function `plan name -> (TensorRtPlan, the same network evaluated)`."""
    networks = {n.name: n for n in describe_networks(family, rtx_config())}
    api = load_api("tensorrt-rtx")
    contents = {name.encode(): n.emitter.network for name, n in networks.items()}

    def load(name: str):
        (tmp_path / f"{name}.plan").write_bytes(name.encode())
        plan = TensorRtPlan(api, Runtime(api.module, contents), tmp_path / f"{name}.plan")
        return plan, EvaluatedPlan(contents[name.encode()])

    yield load
    del networks  # until here, since they keep the weights


@pytest.mark.parametrize("profile", [DECODE, PREFILL])
def test_head_reads_and_writes_at_the_addresses_of_its_tensors(loaded, profile):
    plan, expected = loaded("head_0")
    for p in (plan, expected):
        p.bind({"gains": torch.arange(80.0).view(2, 40)})
    for num_exits in (3, 1):
        exits = {"exit_rows": torch.arange(num_exits).int(), "tiers": torch.ones(num_exits).int()}
        tensors = {"rows": torch.randn(4, 40), **exits}
        logits = plan.run(tensors, profile)
        assert torch.equal(logits, expected.run(tensors, profile))
        assert logits.shape == (num_exits, 61)
    assert plan._contexts[profile].profile == profile


@pytest.fixture
def head(loaded):
    """A plan and what it reads; its contents change in place."""
    plan, expected = loaded("head_0")
    for p in (plan, expected):
        p.bind({"gains": torch.rand(2, 40)} if p is plan else plan._bound)
    exits = {"exit_rows": torch.arange(3).int(), "tiers": torch.ones(3).int()}
    return plan, expected, {"rows": torch.randn(4, 40), **exits}


def test_recorded_run_reads_and_writes_at_its_addresses_whatever_else_runs(head):
    plan, expected, tensors = head
    recorder = RunRecorder()
    recorded = plan.record(tensors, DECODE, recorder)
    for _ in range(2):
        tensors["rows"].normal_()
        recorded.replay()
        assert torch.equal(recorded.output, expected.run(tensors, DECODE))
        others = {"rows": torch.randn(2, 40), "exit_rows": torch.zeros(1).int()}
        others["tiers"] = torch.zeros(1).int()
        assert torch.equal(plan.run(others, DECODE), expected.run(others, DECODE))
    assert recorder.counts() == (1, 2)


def test_recorded_runs_have_contexts_of_their_own_in_shared_memory(head):
    plan, _, tensors = head
    trt = load_api("tensorrt-rtx").module
    plain = len(plan._engine.contexts)
    for _ in range(2):
        plan.record(tensors, DECODE, RunRecorder())
    first, second = plan._engine.contexts[plain:]
    assert first.memory == second.memory and first.memory[1] == 100
    for context in (first, second):
        assert context.config.strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kinds = trt.DynamicShapesKernelSpecializationStrategy
        assert context.config.dynamic_shapes_kernel_specialization_strategy == kinds.EAGER
    assert all(c.config.strategy is None for c in plan._engine.contexts[:plain])


def test_names_that_recorded_contexts_use_are_those_of_the_library():
    trt = load_api("tensorrt-rtx").module
    config = ("set_execution_context_allocation_strategy", "set_runtime_cache")
    config += ("dynamic_shapes_kernel_specialization_strategy",)
    assert all(hasattr(trt.IRuntimeConfig, name) for name in config)
    context = ("set_device_memory", "is_stream_capturable", "set_optimization_profile_async")
    assert all(hasattr(trt.IExecutionContext, name) for name in context)
    assert hasattr(trt.ICudaEngine, "get_device_memory_size_for_profile_v2")


def test_context_that_cannot_be_captured_is_enqueued_at_each_replay(head, monkeypatch):
    plan, expected, tensors = head
    monkeypatch.setattr(Context, "is_stream_capturable", lambda context, stream: False)
    recorder = RunRecorder()
    recorded = plan.record(tensors, DECODE, recorder)
    tensors["rows"].normal_()
    recorded.replay()
    assert torch.equal(recorded.output, expected.run(tensors, DECODE))
    assert recorder.counts() == (0, 0)


def test_shape_that_no_profile_takes_is_refused_by_name(loaded):
    plan, _ = loaded("head_0")
    with pytest.raises(EngineError, match=r"head_0\.plan: gains: no profile takes the shape"):
        plan.bind({"gains": torch.zeros(3, 40)})


def test_compiled_kernels_are_kept_next_to_the_plan(loaded, tmp_path):
    plan, _ = loaded("head_0")
    plan.close()
    assert (tmp_path / "head_0.runtime_cache").read_bytes() == b"kernels"


def test_folder_that_cannot_be_written_costs_nothing_but_compilation(loaded, tmp_path):
    plan, _ = loaded("head_0")
    (tmp_path / "head_0.runtime_cache").mkdir()
    plan.close()


def test_arrays_are_sent_in_one_aligned_buffer():
    arrays = {
        "a": np.arange(5, dtype=np.int32),
        "b": np.zeros((0,), np.int32),
        "c": np.arange(200, dtype=np.int32).reshape(100, 2),
        "d": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    }
    tensors = upload(arrays, torch.device("cpu"))
    begin = tensors["a"].data_ptr()
    for name, array in arrays.items():
        assert tensors[name].tolist() == array.tolist()
        assert not array.size or (tensors[name].data_ptr() - begin) % 256 == 0
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1


def test_module_names_what_it_cannot_import(folder, monkeypatch):
    def missing(target):
        raise EngineError(f"target {target}: cannot import it")

    monkeypatch.setattr(tensorrt_plans, "load_api", missing)
    assert refusal(folder) == "target tensorrt-rtx: cannot import it"
    shutil.rmtree(folder)
