import pytest
import torch

from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint
from tiny_folders import folder_family, write_tiny_family


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def store(request, tmp_path):
    family = folder_family((1, 3, 4), (1,), tie_word_embeddings=request.param)
    return WeightStore(write_tiny_family(tmp_path / "family", family))


@pytest.mark.parametrize(("tier", "exit_layer"), [("t0", 1), ("t1", 3), ("t2", 4)])
def test_final_norm_is_the_tiers_own_and_layers_are_the_familys(store, tier, exit_layer):
    reader = TierCheckpoint(store, tier)
    assert reader.config.num_layers == exit_layer
    assert torch.equal(reader.load("norm.weight"), store.get(f"exits.{exit_layer}.norm.weight"))
    name = f"layers.{exit_layer - 1}.mlp.up_proj.weight"
    assert torch.equal(reader.load(name), store.get(name))


def test_tier_with_a_head_of_its_own_is_not_tied(store):
    reader = TierCheckpoint(store, "t1")
    assert not reader.config.tie_word_embeddings
    assert torch.equal(reader.load("lm_head.weight"), store.get("exits.3.lm_head.weight"))


@pytest.mark.parametrize("tier", ["t0", "t2"])
def test_tier_without_one_has_the_familys(store, tier):
    reader = TierCheckpoint(store, tier)
    is_tied = store.spec.model.tie_word_embeddings
    assert reader.config.tie_word_embeddings == is_tied
    shared = store.get("embed_tokens.weight" if is_tied else "lm_head.weight")
    assert torch.equal(reader.load("lm_head.weight"), shared)


def test_windows_above_the_exit_are_forgotten(tmp_path):
    family = folder_family((1, 4), architecture="qwen2", sliding_window=5, windowed_layers=(2, 3))
    store = WeightStore(write_tiny_family(tmp_path / "family", family))
    low, top = TierCheckpoint(store, "t0").config, TierCheckpoint(store, "t1").config
    assert (low.sliding_window, low.windowed_layers) == (None, ())
    assert (top.sliding_window, top.windowed_layers) == (5, (2, 3))
