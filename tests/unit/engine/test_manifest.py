"""engine.json: read back as written, and each fault named with its file."""

import json
import re
from dataclasses import replace

import pytest

from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.manifest import MANIFEST_NAME, EngineManifest
from mfs_trt.errors import EngineError, FamilyError
from tiny import tiny_family

FAMILY = tiny_family((1, 2, 4))


@pytest.fixture
def manifest(tmp_path):
    """A manifest whose family folder, `tmp_path / "family"`, has a matching `family.json`."""
    folder = tmp_path / "family"
    folder.mkdir()
    (folder / "family.json").write_text(json.dumps(FAMILY.to_json()))
    return EngineManifest(
        target="reference",
        family=str(folder),
        family_revision=FAMILY.revision,
        dtype="float32",
        block_size=16,
        memory_nbytes=1 << 20,
        limits=EngineLimits(3, 5, 7),
    )


def edit(folder, **changes):
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_manifest_reads_back_as_it_was_written(manifest, tmp_path):
    manifest.save(tmp_path)
    assert EngineManifest.load(tmp_path) == manifest
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [MANIFEST_NAME]


@pytest.mark.parametrize("where", ["nowhere", "empty", "file"])
def test_folder_without_manifest_is_refused(tmp_path, where):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=rf"{where}: expected an engine folder with engine.json"):
        EngineManifest.load(tmp_path / where)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1]", r"expected a JSON object, got \[1\]"),
        (b"null", "expected a JSON object, got None"),
    ],
)
def test_content_that_is_no_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(content)
    with pytest.raises(EngineError, match=f"{re.escape(str(path))}: {message}"):
        EngineManifest.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "format_version: expected 1, got 99"),
        ({"speed": 1}, "malformed: .*speed"),
        ({"limits": {"max_num_seqs": 1, "x": 2}}, "malformed: .*'x'"),
        ({"limits": 5}, "malformed"),
    ],
)
def test_unknown_versions_and_keys_are_refused(manifest, tmp_path, changes, message):
    manifest.save(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(EngineError, match=message):
        EngineManifest.load(tmp_path)


def test_missing_key_is_refused_by_name(manifest, tmp_path):
    manifest.save(tmp_path)
    path = tmp_path / MANIFEST_NAME
    data = json.loads(path.read_text())
    del data["block_size"]
    path.write_text(json.dumps(data))
    with pytest.raises(EngineError, match="malformed: .*'block_size'"):
        EngineManifest.load(tmp_path)


def test_family_that_has_changed_since_is_refused_with_both_revisions(manifest):
    assert manifest.load_family() == FAMILY
    with pytest.raises(EngineError, match="revision tiny is not the other that .* build it again"):
        replace(manifest, family_revision="other").load_family()


def test_family_that_has_gone_is_refused(manifest, tmp_path):
    with pytest.raises(FamilyError, match="expected a family folder with family.json"):
        replace(manifest, family=str(tmp_path)).load_family()


def test_arena_has_as_many_frames_as_fit(manifest):
    spec = manifest.kv_spec(FAMILY, manifest.layer_nbytes(FAMILY, itemsize=4))
    # K and V of 1 layer, 2 heads, 16 tokens of 6 numbers of 4 bytes.
    assert spec.frame_nbytes == 2 * 1 * 2 * 16 * 6 * 4
    features = 2 * spec.num_feature_slots * FAMILY.model.hidden_size * 4  # of both boundaries
    used = spec.nbytes + features
    assert (1 << 20) - 2 * spec.frame_nbytes < used <= 1 << 20


def test_feature_pools_hold_the_tokens_that_the_arena_holds_at_the_top_tier(manifest):
    spec = manifest.kv_spec(FAMILY, manifest.layer_nbytes(FAMILY, itemsize=4))
    usable_blocks = spec.num_feature_slots // spec.block_size - 1
    assert abs(usable_blocks - spec.num_frames // 4) <= 1  # a block of every segment: 4 frames


def test_memory_for_one_block_only_leaves_the_features_out(manifest):
    nbytes = manifest.layer_nbytes(FAMILY, itemsize=4)
    spec = replace(manifest, memory_nbytes=5 * nbytes + 10).kv_spec(FAMILY, nbytes)
    assert spec.num_frames == 5 and spec.num_feature_slots == 0
    assert spec.nbytes <= 1 << 20
    assert (spec.group_size, spec.groups_per_segment) == (1, (1, 1, 2))
    assert spec.frames_needed(tier=1, num_tokens=17) == 2 * 2


def test_memory_for_less_than_one_block_of_each_segment_is_refused_in_bytes(manifest):
    needed = 5 * 1536  # four layer groups and the null frame
    assert replace(manifest, memory_nbytes=needed).kv_spec(FAMILY, 1536).num_frames == 5
    with pytest.raises(EngineError, match=rf"at least {needed} bytes .*, got {needed - 1}"):
        replace(manifest, memory_nbytes=needed - 1).kv_spec(FAMILY, 1536)


def test_target_that_this_version_does_not_run_is_refused_by_name(manifest, tmp_path):
    replace(manifest, target="warp").save(tmp_path)
    with pytest.raises(EngineError, match=r"expected one that this version runs .*, got 'warp'"):
        load_engine(tmp_path)
