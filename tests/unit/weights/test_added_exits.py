import pytest
import torch

from mfs_trt.errors import ConfigError, FamilyError
from mfs_trt.family.spec import load_family
from mfs_trt.weights.added_exits import add_exits
from mfs_trt.weights.store import WeightStore
from tiny_folders import folder_family, write_tiny_family


@pytest.fixture
def store(tmp_path):
    return WeightStore(write_tiny_family(tmp_path / "family", folder_family((2, 4), (0,))))


def test_new_exits_stand_between_the_old_ones_which_keep_their_own(store, tmp_path):
    spec = add_exits(store, (1, 2, 3, 4), tmp_path / "more")
    found = WeightStore(tmp_path / "more")
    assert found.spec == spec
    assert [tier.name for tier in spec.tiers] == ["layer1", "t0", "layer3", "t1"]
    top = store.get("exits.4.norm.weight")
    assert torch.equal(found.get("exits.3.norm.weight"), top)
    assert torch.equal(found.get("exits.2.norm.weight"), store.get("exits.2.norm.weight"))
    assert found.head_name(0) == "lm_head.weight"
    assert found.head_name(1) == "exits.2.lm_head.weight"


def test_weights_are_linked_not_copied(store, tmp_path):
    add_exits(store, (1,), tmp_path / "more")
    assert (tmp_path / "more" / "base.safetensors").is_symlink()
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(WeightStore(tmp_path / "more").get(name), store.get(name))


def test_revisions_tell_different_exits_apart(store, tmp_path):
    first = add_exits(store, (1,), tmp_path / "a").revision
    assert first != add_exits(store, (3,), tmp_path / "b").revision
    assert first != load_family(store.folder).revision


def test_exit_beyond_the_model_is_refused(store, tmp_path):
    with pytest.raises(FamilyError, match="expected layers 1 to 4"):
        add_exits(store, (5,), tmp_path / "more")


def test_existing_folder_is_never_replaced(store):
    with pytest.raises(ConfigError):
        add_exits(store, (1,), store.folder)
