import pytest

from mfs_trt.family.costs import format_nbytes, freed_kv_tokens, tier_costs, weight_sharing
from mfs_trt.family.spec import FamilySpec, TierSpec
from tiny import tiny_config

TIERS = (TierSpec("a", 1), TierSpec("b", 4))


def make(tiers=TIERS, **overrides):
    return FamilySpec(tiny_config(**overrides), tiers, "r", (), "bfloat16")


# 24 hidden, 32 MLP, 4 heads and 2 KV heads of 6, 61 tokens, 4 layers
LAYER = 2 * 24 * 24 + 2 * 12 * 24 + 3 * 24 * 32 + 2 * 24
HEAD = 61 * 24


def test_tiers_add_their_layers_and_exits():
    small, large = tier_costs(make(), kv_itemsize=2)
    assert (small.num_layers, large.num_layers) == (1, 3)
    assert small.num_parameters == 2 * HEAD + LAYER + 24
    assert large.num_parameters == 3 * LAYER + 24
    assert large.total_parameters == 2 * HEAD + 4 * LAYER + 2 * 24
    assert large.total_weight_nbytes == 2 * large.total_parameters


@pytest.mark.parametrize(
    ("overrides", "own_head", "tensors"),
    [({}, True, 3), ({"tie_word_embeddings": True}, False, 1)],
)
def test_heads_count_once_each(overrides, own_head, tensors):
    tiers = (TierSpec("a", 1, own_head=own_head), TierSpec("b", 4))
    costs = tier_costs(make(tiers, **overrides), kv_itemsize=2)
    assert costs[-1].total_parameters == tensors * HEAD + 4 * LAYER + 2 * 24


def test_total_equals_the_tensors_of_the_folder():
    family = make((TierSpec("a", 1, own_head=True), TierSpec("b", 4)), qkv_bias=True, mlp_bias=True)
    count = 0
    for shape in family.tensor_shapes().values():
        size = 1
        for axis in shape:
            size *= axis
        count += size
    assert tier_costs(family, kv_itemsize=2)[-1].total_parameters == count


def test_kv_bytes_are_keys_and_values_of_every_layer():
    small, large = tier_costs(make(), kv_itemsize=4)
    per_layer = 2 * 2 * 6 * 4
    assert (small.kv_nbytes_per_token, large.kv_nbytes_per_token) == (per_layer, 3 * per_layer)
    assert large.total_kv_nbytes_per_token == 4 * per_layer


def test_separate_servers_hold_the_lower_layers_again():
    weights = weight_sharing(make())
    small, large = (tier.standalone_parameters * 2 for tier in tier_costs(make(), 2))
    assert weights.separate_nbytes == small + large
    assert weights.ratio == (small + large) / weights.family_nbytes


def test_saved_weight_memory_is_counted_in_tokens_of_the_deepest_tier():
    weights = weight_sharing(make())
    saved = weights.separate_nbytes - weights.family_nbytes
    assert freed_kv_tokens(make(), 4) == saved // (4 * 2 * 2 * 6 * 4)


def test_arithmetic_counts_two_per_matrix_weight_and_the_head():
    small, _ = tier_costs(make(), kv_itemsize=2)
    assert small.flops_per_token == 2 * (LAYER - 2 * 24 + HEAD)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_are_printed_for_people(count, text):
    assert format_nbytes(count) == text
