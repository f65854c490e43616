"""The family that the package ships: whole, small, and each tier a usable model."""

import json
from pathlib import Path

import pytest

import mfs_trt
from mfs_trt import LLM, SamplingParams
from mfs_trt.weights.store import WeightStore

FOLDER = Path(mfs_trt.__file__).parent / "families" / "prose"
TEXT = (
    "The old man walked slowly down to the river, and when he had come to the bridge he stopped "
    "and looked at the water for a long time without saying a word to anybody."
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield LLM(FOLDER)


def test_it_is_what_its_revision_says_and_small_enough_to_ship():
    WeightStore(FOLDER).verify()
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 25e6
    assert [t.exit_layer for t in WeightStore(FOLDER).spec.tiers] == [2, 4, 6, 8]


def test_deeper_tiers_know_the_language_better():
    recipe = json.loads((FOLDER / "recipe.json").read_text())
    losses = list(list(recipe["runs"].values())[-1]["held_out_loss"].values())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 4.0


def test_lower_tiers_agree_with_the_top_often_enough_to_draft(llm):
    """Greedy decoding with drafts gives the text without, and many of the drafts stand."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    plain = llm.generate(TEXT, params, tier="large")[0].outputs[0]
    events = list(
        llm.stream(TEXT, params, tier="large", draft_tiers=("draft",), num_speculative_tokens=3)
    )
    assert [t for e in events for t in e.token_ids] == plain.token_ids
    assert events[-1].num_accepted_draft_tokens > 0.2 * events[-1].num_draft_tokens
