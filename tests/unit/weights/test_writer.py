import json
from math import prod

import pytest
import torch

from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.writer import TensorEntry, write_family
from tiny import tiny_config

TIERS = (TierSpec("small", 2), TierSpec("large", 4))


def entries(seed=0, load=None):
    """The tensors of a tiny family; `load(shape)` makes each one."""
    generator = torch.Generator().manual_seed(seed)
    make = load or (lambda shape: torch.randn(shape, generator=generator))
    family = FamilySpec(tiny_config(), TIERS, "", (), "float32")
    return [
        TensorEntry(name, shape, "float32", lambda shape=shape: make(shape))
        for name, shape in family.tensor_shapes().items()
    ]


def write(folder, tensors=None, **options):
    return write_family(folder, tiny_config(), TIERS, "float32", tensors or entries(), **options)


def test_written_family_is_read_back(tmp_path):
    tensors = {e.name: e.load() for e in entries()}
    given = [TensorEntry(n, tuple(t.shape), "float32", lambda t=t: t) for n, t in tensors.items()]
    spec = write(tmp_path / "f", given, end_token_ids=(2, 5), source="a test")
    store = WeightStore(tmp_path / "f")
    assert store.spec == spec
    assert (spec.end_token_ids, spec.source, len(spec.revision)) == ((2, 5), "a test", 64)
    assert all(torch.equal(store.get(name), tensor) for name, tensor in tensors.items())


def test_equal_content_has_an_equal_revision_whatever_the_order(tmp_path):
    tensors = {e.name: e.load() for e in entries()}
    given = [TensorEntry(n, tuple(t.shape), "float32", lambda t=t: t) for n, t in tensors.items()]
    first, second = write(tmp_path / "a", given), write(tmp_path / "b", given[::-1])
    assert first.revision == second.revision


def test_another_weight_config_or_tier_has_another_revision(tmp_path):
    revisions = {
        write(tmp_path / "a", entries(seed=0)).revision,
        write(tmp_path / "b", entries(seed=1)).revision,
        write_family(
            tmp_path / "c", tiny_config(rms_norm_eps=1e-6), TIERS, "float32", entries(seed=0)
        ).revision,
        write_family(
            tmp_path / "d",
            tiny_config(),
            (TierSpec("other", 2), TierSpec("large", 4)),
            "float32",
            entries(seed=0),
        ).revision,
    }
    assert len(revisions) == 4


def test_each_tensor_is_loaded_once_in_order_and_reported(tmp_path):
    loaded, reported = [], []

    def load(shape):
        loaded.append(shape)
        return torch.zeros(shape)

    tensors = entries(load=load)
    write(tmp_path / "f", tensors, on_tensor=lambda entry: reported.append(entry.name))
    assert loaded == [entry.shape for entry in tensors]
    assert reported == [entry.name for entry in tensors]


def test_failure_leaves_nothing_behind(tmp_path):
    left = iter(range(10))

    def load(shape):
        if next(left) == 5:
            raise OSError("disk")
        return torch.zeros(shape)

    with pytest.raises(OSError, match="disk"):
        write(tmp_path / "f", entries(load=load))
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_family_that_was_there(tmp_path):
    spec = write(tmp_path / "f")

    def load(shape):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "f", entries(load=load), force=True)
    assert WeightStore(tmp_path / "f").spec == spec
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_family_is_replaced_only_by_force(tmp_path):
    write(tmp_path / "f", entries(seed=0))
    with pytest.raises(ConfigError, match="--force"):
        write(tmp_path / "f", entries(seed=1))
    spec = write(tmp_path / "f", entries(seed=1), force=True)
    assert WeightStore(tmp_path / "f").spec == spec
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("force", [False, True])
def test_folder_that_holds_no_family_is_never_overwritten(tmp_path, force):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="never overwritten"):
        write(tmp_path / "f", force=force)
    assert (tmp_path / "f" / "thesis.txt").read_text() == "years of work"


def test_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError, match="never overwritten"):
        write(tmp_path / "f")


def test_empty_folder_is_used(tmp_path):
    (tmp_path / "f").mkdir()
    write(tmp_path / "f")
    assert WeightStore(tmp_path / "f").names()


def test_nothing_is_loaded_before_the_place_is_found_good(tmp_path):
    (tmp_path / "f").write_text("x")

    def load(shape):
        raise AssertionError("loaded")

    with pytest.raises(ConfigError):
        write(tmp_path / "f", entries(load=load))


def test_folder_has_the_permissions_of_the_umask(tmp_path):
    write(tmp_path / "f")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_manifest_is_json_with_sizes_of_the_file(tmp_path):
    write(tmp_path / "f")
    data = json.loads((tmp_path / "f" / "family.json").read_text())
    assert data["weight_files"] == ["base.safetensors"]
    size = (tmp_path / "f" / "base.safetensors").stat().st_size
    assert size > 4 * sum(prod(entry.shape) for entry in entries())
