from math import gcd

import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.family.tiers import even_exits, parse_tiers


def layers(text, num_layers=30):
    return [(tier.name, tier.exit_layer) for tier in parse_tiers(text, num_layers)]


NAMED = [("small", 10), ("medium", 20), ("large", 30)]


@pytest.mark.parametrize(
    "text",
    ["3", "10,20,30", " 10, 20 ,30", "0.33,0.66,1.0", "0.33,0.66,1", "small=10,medium=20,large=30"],
)
def test_three_tiers_may_be_written_in_every_way(text):
    assert layers(text) == NAMED


def test_names_take_fractions_too():
    assert layers("draft=0.2,full=1.0") == [("draft", 6), ("full", 30)]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, ["tier0"]),
        (2, ["small", "large"]),
        (3, ["small", "medium", "large"]),
        (4, ["tier0", "tier1", "tier2", "tier3"]),
    ],
)
def test_unnamed_tiers_get_default_names(count, names):
    assert [tier.name for tier in parse_tiers(str(count), 32)] == names


def test_shared_head_is_the_default_and_own_heads_stop_below_the_top():
    assert [tier.own_head for tier in parse_tiers("3", 30)] == [False] * 3
    assert [tier.own_head for tier in parse_tiers("3", 30, own_heads=True)] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10,20", ("30", "20", "depth")),
        ("10,20,40", ("30", "40")),
        ("20,10,30", ("ascending", "[20, 10, 30]")),
        ("0,30", ("ascending", "[0, 30]")),
        ("10,10,30", ("ascending",)),
        ("0.5,0.9", ("depth", "27")),
        ("0.5,1.5", ("1.5",)),
        ("nan.,1.0", ("nan",)),
        ("0", ("between 1 and 30", "0")),
        ("31", ("between 1 and 30", "31")),
        ("", ("numbers",)),
        ("10,,30", ("numbers", "10,,30")),
        ("ten,30", ("exit layer", "ten")),
        ("-10,30", ("exit layer", "-10")),
        ("a=10,30", ("every tier or for none",)),
        ("a=10,a=30", ("distinct", "a, a")),
        ("a b=10,c=30", ("name", "a b")),
    ],
)
def test_wrong_text_is_refused_with_what_was_expected(text, words):
    with pytest.raises(ConfigError) as refusal:
        parse_tiers(text, 30)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("num_layers", range(1, 81))
def test_counted_exits_are_near_even_and_use_the_largest_group_that_is(num_layers):
    for count in range(1, min(num_layers, 6) + 1):
        exits = even_exits(count, num_layers)
        assert len(exits) == count
        assert exits[-1] == num_layers
        assert all(a < b for a, b in zip((0, *exits), exits, strict=False))
        allowed = max(num_layers / count / 4, 0.5)
        moved = [abs(e - (i + 1) * num_layers / count) for i, e in enumerate(exits)]
        assert max(moved) <= allowed
        if num_layers % count == 0:
            assert gcd(*exits) == num_layers // count


def test_counted_exits_prefer_large_layer_groups_over_evenness():
    assert even_exits(3, 32) == (12, 20, 32)
