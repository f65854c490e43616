"""Loading an openvino engine folder: what does not fit is named, with both sides, in one line."""

import hashlib
import json
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from mfs_trt.engine import load_engine, openvino_attention, openvino_plans
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.openvino import OpenVinoEngine
from mfs_trt.engine.openvino_inputs import BoundInputs
from mfs_trt.errors import EngineError, FamilyError, MfsError
from steps import Steps
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

FAMILY = folder_family((1, 3), (0,))
NUM_FRAMES = 6


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Family folder and engine folder; not to be written to."""
    folder = tmp_path_factory.mktemp("built")
    family = write_tiny_family(folder / "family", FAMILY)
    return family, build_tiny_engine(family, folder / "engine", "openvino")


@pytest.fixture
def folder(built, tmp_path) -> Path:
    """A copy of the engine folder."""
    return shutil.copytree(built[1], tmp_path / "engine")


def refusal(folder: Path, error: type[MfsError] = EngineError) -> str:
    """The message with which the engine folder is refused."""
    with pytest.raises(error) as caught:
        load_engine(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_engine_built_by_another_openvino_is_refused_with_both_versions(folder):
    replace(EngineManifest.load(folder), backend_version="2031.1.0").save(folder)
    message = refusal(folder)
    assert f"built with openvino 2031.1.0, found {ov.__version__}" in message
    assert message.startswith(str(folder))


PLAN_FILES = [
    f"{plan}.{suffix}"
    for plan in ("segment_0", "segment_1", "head_0", "head_1")
    for suffix in ("xml", "bin")
]


@pytest.mark.parametrize("name", PLAN_FILES)
def test_missing_file_of_a_plan_is_refused_by_path(folder, name):
    (folder / name).unlink()
    assert refusal(folder) == f"{folder / name}: missing; build the engine again"


@pytest.mark.parametrize("name", PLAN_FILES)
@pytest.mark.parametrize("fault", ["truncated", "corrupt", "empty"])
def test_changed_file_of_a_plan_is_refused_with_both_digests(folder, name, fault):
    path = folder / name
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    path.write_bytes(
        {
            "truncated": content[:-1],
            "corrupt": content[:middle] + flipped + content[middle + 1 :],
            "empty": b"",
        }[fault]
    )
    expected = EngineManifest.load(folder).plan(Path(name).stem).files[name]
    start = f"{path}: truncated or corrupt: expected SHA-256 {expected[:12]}, got "
    assert refusal(folder).startswith(start)


@pytest.mark.parametrize("content", ["<net", ""])
def test_plan_that_openvino_cannot_read_is_refused_by_path(folder, content):
    path = folder / "segment_1.xml"
    path.write_text(content)
    manifest = EngineManifest.load(folder)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for plan in manifest.plans:  # the manifest vouches for it
        if path.name in plan.files:
            plan.files[path.name] = digest
    manifest.save(folder)
    assert refusal(folder).startswith(f"{path}: OpenVINO cannot load this plan: ")


@pytest.mark.parametrize("fault", ["missing", "truncated", "empty", "garbage"])
def test_weight_file_of_the_family_that_is_damaged_since_is_refused_by_path(
    built, folder, tmp_path, fault
):
    family = shutil.copytree(built[0], tmp_path / "family")
    path = family / "base.safetensors"
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        new = {"truncated": content[: len(content) // 8], "empty": b"", "garbage": b"\xff" * 4096}
        path.write_bytes(new[fault])
    replace(EngineManifest.load(folder), family=str(family)).save(folder)
    assert str(path) in refusal(folder, FamilyError)


def test_bfloat16_on_a_cpu_without_it_is_refused_with_what_the_cpu_has(folder, monkeypatch):
    class OldCpu:
        def get_property(self, device, name):
            return ["FP32", "INT8"]

    monkeypatch.setattr(openvino_plans, "reading_core", OldCpu)
    replace(EngineManifest.load(folder), dtype="bfloat16").save(folder)
    message = refusal(folder)
    assert "dtype bfloat16, expected float32: OpenVINO computes in FP32, INT8 on this" in message


def test_plan_that_the_manifest_does_not_list_is_refused_by_name(folder):
    manifest = EngineManifest.load(folder)
    replace(manifest, plans=manifest.plans[:1]).save(folder)
    assert refusal(folder) == "plans: expected one called segment_1, got segment_0"


def test_family_that_has_changed_since_is_refused_with_both_revisions(built, folder, tmp_path):
    family = shutil.copytree(built[0], tmp_path / "family")
    path = family / "family.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "f" * 64}))
    manifest = EngineManifest.load(folder)
    replace(manifest, family=str(family)).save(folder)
    message = refusal(folder)
    assert f"revision {'f' * 12} is not the {manifest.family_revision[:12]}" in message


def test_operator_with_other_inputs_is_refused_with_the_version_that_is_known(folder, monkeypatch):
    operator = openvino_attention._PagedAttentionExtension
    monkeypatch.setattr(
        openvino_attention, "_PagedAttentionExtension", lambda inputs: operator(inputs[:-1])
    )
    start = f"openvino {ov.__version__}: its paged-attention operator is not that of 2026.4.1: "
    message = refusal(folder)
    assert message.startswith(start)
    assert "expects 28 inputs, but it has 27" in message


def test_memory_for_less_than_one_block_of_each_segment_is_refused_in_bytes(folder):
    # Group size 1: 3 frames of blocks and the null frame.
    frame_nbytes = load_engine(folder).kv_spec.frame_nbytes
    needed = 4 * frame_nbytes
    manifest = EngineManifest.load(folder)
    replace(manifest, memory_nbytes=needed).save(folder)
    load_engine(folder)
    replace(manifest, memory_nbytes=needed - 1).save(folder)
    assert f"memory: expected at least {needed} bytes" in refusal(folder)
    assert refusal(folder).endswith(f"got {needed - 1}")


def test_arena_that_the_machine_has_no_memory_for_is_refused_in_bytes(folder):
    replace(EngineManifest.load(folder), memory_nbytes=1 << 50).save(folder)
    assert re.match(r"memory: expected room for a KV arena of \d{15} bytes: ", refusal(folder))


@pytest.mark.parametrize(
    ("kv_dtype", "row_nbytes"), [("", 4 * 16), ("uint8", None)], ids=["float32", "uint8"]
)
def test_arena_is_counted_in_the_bytes_that_it_takes(built, tmp_path, kv_dtype, row_nbytes):
    out = build_tiny_engine(built[0], tmp_path / "engine", "openvino", kv_dtype=kv_dtype)
    engine = load_engine(out)
    spec = engine.kv_spec
    tensors = [t.array for pair in engine.arena for t in pair]
    assert spec.nbytes == sum(t[: spec.num_frames].nbytes for t in tensors)
    features = sum(array.nbytes for array in engine.features)
    assert spec.nbytes + features <= 8 << 20 < spec.nbytes + features + 2 * spec.frame_nbytes
    if row_nbytes is not None:
        assert spec.layer_nbytes == 2 * spec.num_kv_heads * spec.block_size * row_nbytes


def test_engine_binds_every_input_of_every_plan_by_name(built, monkeypatch):
    bound: dict[BoundInputs, set[str]] = defaultdict(set)
    bind = BoundInputs.bind

    def remember(inputs, name, tensor):
        bound[inputs].add(name)
        bind(inputs, name, tensor)

    monkeypatch.setattr(BoundInputs, "bind", remember)
    engine = load_engine(built[1])
    Steps(engine, np.zeros((1, 32), np.int32)).step((0, 0, 5))
    plans = [*engine._segments, *engine._heads.values()]
    assert len(plans) == 2 * len(FAMILY.tiers)  # each has a head of its own
    for plan in plans:
        assert bound[plan.inputs] == {port.any_name for port in plan.request.model_inputs}


def test_an_input_whose_shape_stays_keeps_its_memory_and_takes_the_new_values(built):
    inputs = load_engine(built[1])._segments[0].inputs
    arrays = [np.arange(3, dtype=np.int32) + i for i in range(3)]
    inputs.write({"positions": arrays[0]})
    first = inputs._request.get_tensor("positions").data
    inputs.write({"positions": arrays[1]})
    assert first.tolist() == inputs._request.get_tensor("positions").data.tolist() == [1, 2, 3]
    assert arrays[0].tolist() == [0, 1, 2]  # the caller's own is not written
    inputs.write({"positions": np.zeros(5, np.int32)})
    assert inputs._request.get_tensor("positions").data.tolist() == [0] * 5


def test_threads_are_those_that_the_operator_set(built, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = load_engine(built[1])
    plan = engine._segments[0].request.get_compiled_model()
    assert plan.get_property("INFERENCE_NUM_THREADS") == 1


def test_weight_files_have_no_resident_pages_after_the_first_step(built):
    engine = load_engine(built[1])
    Steps(engine, np.zeros((1, 32), np.int32)).step((0, 0, 5))
    resident, is_ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = line.endswith(".bin") and str(built[1].resolve()) in line
        elif is_ours and line.startswith("Rss:"):
            resident.append(int(line.split()[1]))
    assert resident and not any(resident)


def test_closed_engine_holds_no_arena(built):
    engine: OpenVinoEngine = load_engine(built[1])
    engine.close()
    assert not engine.arena and not engine.features
