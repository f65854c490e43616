import json

import pytest

from mfs_trt.errors import FamilyError
from mfs_trt.family.spec import FamilySpec, TierSpec, load_family
from tiny import tiny_config, tiny_family


def make(tiers, **overrides):
    return FamilySpec(tiny_config(**overrides), tiers, "r", (), "float32")


def test_json_round_trip_keeps_everything(tmp_path):
    family = tiny_family()
    (tmp_path / "family.json").write_text(json.dumps(family.to_json()))
    assert load_family(tmp_path) == family


def test_head_is_own_shared_or_tied():
    tiers = (TierSpec("a", 2, own_head=True), TierSpec("b", 4))
    untied, tied = make(tiers), make(tiers, tie_word_embeddings=True)
    assert [untied.head_name(i) for i in range(2)] == ["exits.2.lm_head.weight", "lm_head.weight"]
    assert tied.head_name(1) == "embed_tokens.weight"


def test_tensors_are_the_base_with_one_norm_per_exit():
    shapes = make((TierSpec("a", 2, own_head=True), TierSpec("b", 4))).tensor_shapes()
    exits = {name: shape for name, shape in shapes.items() if name.startswith("exits.")}
    assert exits == {
        "exits.2.norm.weight": (24,),
        "exits.2.lm_head.weight": (61, 24),
        "exits.4.norm.weight": (24,),
    }
    assert "norm.weight" not in shapes
    assert shapes["layers.3.self_attn.k_proj.weight"] == (12, 24)


def test_frames_per_block_are_segment_layers_over_their_divisor():
    family = tiny_family((2, 4, 8))
    assert (family.group_size, family.groups_per_segment) == (2, (1, 1, 2))


def test_unknown_tier_is_refused_with_the_known_ones():
    with pytest.raises(FamilyError, match=r"t0, t1, t2.*'huge'"):
        tiny_family().tier_index("huge")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"format_version": 99}', "format_version: expected 1, got 99"),
        ('{"format_version": 1}', "malformed"),
    ],
)
def test_broken_manifest_is_refused(tmp_path, text, words):
    (tmp_path / "family.json").write_text(text)
    with pytest.raises(FamilyError, match=words):
        load_family(tmp_path)


def test_manifest_with_an_impossible_model_is_refused(tmp_path):
    data = tiny_family().to_json()
    data["model"]["num_kv_heads"] = 3
    (tmp_path / "family.json").write_text(json.dumps(data))
    with pytest.raises(FamilyError, match="num_kv_heads"):
        load_family(tmp_path)


def test_folder_without_manifest_is_refused_by_name(tmp_path):
    with pytest.raises(FamilyError, match=r"family\.json"):
        load_family(tmp_path)
