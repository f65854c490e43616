"""Keys keep apart what is not equal: variants, their versions, salts. Whoever stores content uses
them.

Variants are not served yet: what a request of one will say of itself is set here by hand.
"""

import os
import pickle
import random
import subprocess
import sys
from itertools import product
from typing import NamedTuple

import pytest

from host_logic import make_manager, make_request
from mfs_trt.kv_cache import feature_store, manager
from mfs_trt.kv_cache.prefix_keys import BlockKey, TokenChain

SHARED = list(range(100, 140))
PROMPTS = [[*SHARED[:length], own] for length, own in ((39, 1), (40, 2), (8, 3), (23, 1), (40, 1))]
TIERS = (0, 2, 1)


class Context(NamedTuple):
    """All that cached content depends on beside tokens and segment."""

    kv_group: int = 0
    revision: str = "v1"
    salt: str = ""


@pytest.fixture
def serve(monkeypatch):
    """`(kv_cache, context, prompt, tier)`: run a request to its end; returns what it found cached:
    tokens per segment, and up to where features are kept.
    """
    count = iter(range(10_000))

    def run(kv_cache, context: Context, prompt: list[int], tier: int) -> list[int]:
        for module in (manager, feature_store):
            monkeypatch.setattr(module, "BASE_GROUP", context.kv_group)
        kv_cache.revision = context.revision
        request = make_request(
            f"r{next(count)}", prompt=prompt, tier=tier, reuse_prefix=True, cache_salt=context.salt
        )
        kv_cache.open(request)
        counts, features = request.num_computed_tokens, kv_cache.features
        boundaries = range(min(tier + 1, len(features.pools)))
        found = [*counts, *(features.end(request, b, 0) for b in boundaries)]
        size = len(prompt)
        assert kv_cache.allocate_slots(request, [size] * (tier + 1))
        if tier < len(features.pools) and not features.end(request, tier, 0):
            features.reserve(request, tier, counts[tier], size, 0)
        request.num_computed_tokens = [size] * (tier + 1)
        kv_cache.commit(request)
        kv_cache.forget(request)
        kv_cache.check_integrity()
        return found

    return run


def make_cache(num_frames: int = 4000):
    return make_manager(num_frames, block_size=4, num_feature_slots=4000)


def test_row_24_the_same_prompts_of_several_variants_find_what_they_find_without_the_others(serve):
    """Row 24: the prefix cache is shared across adapters."""
    contexts = [Context(*fields) for fields in product((0, 1, 2), ("v1", "v2"), ("", "s"))]
    asked = [(c, prompt, tier) for c in contexts for prompt in PROMPTS for tier in TIERS]
    random.Random(0).shuffle(asked)
    together = make_cache()
    found = [serve(together, *one) for one in asked]
    for context in contexts:
        alone = make_cache()
        mine = [(found[i], one) for i, one in enumerate(asked) if one[0] == context]
        assert [serve(alone, *one) for _, one in mine] == [f for f, _ in mine]
        assert not any(mine[0][0]) and any(any(f) for f, _ in mine)  # shared within a variant


@pytest.mark.parametrize(
    "other", [Context(kv_group=1), Context(revision="v2"), Context(salt="s")], ids=str
)
def test_row_24_a_prompt_just_served_is_cold_for_whoever_differs_in_one_field(serve, other):
    """Row 24: the prefix cache is shared across adapters."""
    cache, prompt = make_cache(), PROMPTS[1]
    serve(cache, Context(), prompt, tier=0)
    assert not any(serve(cache, other, prompt, tier=1))
    # One segment's keys and values, and the features above it.
    assert serve(cache, Context(), prompt, tier=1) == [40, 0, 40, 0]
    assert serve(cache, other, prompt, tier=1)[:2] == [40, 40]


def test_row_25_content_of_a_replaced_version_is_out_of_reach_and_makes_room(serve):
    """Row 25: an adapter that is loaded again under its name finds the old one's content."""
    cache = make_cache(num_frames=1 + 50)
    before, after = Context(1, "a, loaded first"), Context(1, "a, loaded again")
    serve(cache, before, PROMPTS[1], tier=2)
    assert serve(cache, before, PROMPTS[1], tier=2)[:3] == [40, 40, 40]
    assert serve(cache, after, PROMPTS[1], tier=2)[:3] == [0, 0, 0]
    assert cache.pool.num_evictions > 0  # two do not fit: the old version's frames were taken
    assert serve(cache, after, PROMPTS[1], tier=2)[:3] == [40, 40, 40]


def test_row_27_all_pools_file_content_under_one_type_of_key(serve):
    """Row 27: a store beside the cache leaves the adapter out of its keys."""
    cache = make_cache()
    for context in (Context(0), Context(1)):
        for tier in (0, 1, 2):
            serve(cache, context, PROMPTS[1], tier)
    assert BlockKey._fields == ("segment", "kv_group", "digest")
    for pool in (cache.pool, *cache.features.pools):
        assert {type(key) for key in pool._by_key} == {BlockKey}
        assert {key.kv_group for key in pool._by_key} == {0, 1}


def test_row_27_a_key_means_the_same_in_another_process():
    """Row 27: so that a store outside this process can use it as it is."""
    chain = TokenChain("revision", "salt", 4)
    chain.extend(SHARED, len(SHARED))
    mine = {BlockKey(s, 1, digest) for s in range(3) for digest in chain.digests}
    code = (
        "import pickle, sys\n"
        "from mfs_trt.kv_cache.prefix_keys import BlockKey, TokenChain\n"
        "chain = TokenChain('revision', 'salt', 4)\n"
        f"chain.extend({SHARED}, {len(SHARED)})\n"
        "keys = {BlockKey(s, 1, digest) for s in range(3) for digest in chain.digests}\n"
        "sys.stdout.buffer.write(pickle.dumps(keys))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert pickle.loads(done.stdout) == mine
