"""Reused content gives the tokens of no reuse, whatever keys and values are kept as.

On the same engine with and without reuse. Steps of other shapes round differently: where two runs
part, the two tokens must tie in the reference's logits, by less than the rounding of the dtype.
"""

import numpy as np
import pytest

from alone import logits_alone
from cpu_features import needs_bfloat16
from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.model.transformer import NestedModel
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from mfs_trt.weights.store import WeightStore
from run_together import Arrival, run_on
from steps import num_ties
from tiny_folders import build_tiny_engine, folder_family, write_tiny_family

# target, dtype, KV dtype, and by how much of the logits' spread tokens may tie
KINDS = [
    ("openvino", "float32", "", 1e-5),
    ("openvino", "float32", "uint8", 0.05),
    pytest.param("openvino", "bfloat16", "", 0.1, marks=needs_bfloat16),
    pytest.param("openvino", "bfloat16", "uint8", 0.1, marks=needs_bfloat16),
    ("reference", "float32", "", 1e-5),
    ("reference", "bfloat16", "", 0.1),
]
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=160, max_model_len=256)
SHARED = np.random.default_rng(1).integers(0, 61, 97).tolist()


def arrivals(reuses: bool) -> list[Arrival]:
    """Requests that share prefixes up to borders of blocks of 32 and beside them, one after the
    other; some draft, some change their tier.
    """
    cases = [
        # (length of the shared prefix, tier, tiers that draft, (step, tier) to move to)
        (97, "t2", (), ()),
        (63, "t0", (), ((4, "t2"),)),
        (64, "t2", ("t0",), ()),
        (65, "t1", (), ((3, "t0"), (6, "t2"))),
        (97, "t2", ("t0", "t1"), ()),
        (96, "t2", (), ((2, "t1"),)),
        (33, "t1", ("t0",), ((5, "t2"),)),
    ]
    return [
        Arrival(
            PromptRequest(
                f"r{i}",
                SamplingParams(max_tokens=10, end_id=-1),
                token_ids=[*SHARED[:length], i],
                tier=tier,
                draft_tiers=chain,
                num_speculative_tokens=2,
                reuse_prefix=reuses,
            ),
            step=6 * i,
            switches=switches,
        )
        for i, (length, tier, chain, switches) in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family") / "f", folder_family((1, 2, 4)))


@pytest.mark.parametrize(("target", "dtype", "kv_dtype", "tolerance"), KINDS)
def test_row_30_reuse_gives_the_tokens_of_no_reuse_for_every_kv_dtype(
    family, tmp_path, target, dtype, kv_dtype, tolerance
):
    """Row 30: reuse is wrong with a narrow KV dtype."""
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "limits": LIMITS}
    core = EngineCore(
        load_engine(build_tiny_engine(family, tmp_path / "e", target, **settings)), tokenizer=None
    )
    cold = run_on(core, arrivals(reuses=False))
    assert not any(core.scheduler.kv_cache.num_reused_tokens)
    core.reset()
    warm = run_on(core, arrivals(reuses=True))
    assert all(core.scheduler.kv_cache.num_reused_tokens)  # in every segment
    model = NestedModel.from_store(WeightStore(family), LIMITS.max_model_len)
    num_parted = 0
    for arrival in arrivals(reuses=True):
        name, prompt = arrival.request.request_id, arrival.request.token_ids
        a, b = cold[name], warm[name]
        assert len(a.token_ids) == len(b.token_ids) == 10
        pairs = zip(a.token_ids, b.token_ids, a.tiers, b.tiers, strict=True)
        first = next((i for i, (x, y, t, u) in enumerate(pairs) if (x, t) != (y, u)), None)
        if first is None:
            continue
        if a.tiers[first] != b.tiers[first]:  # of the one that drafts first and then moves
            assert name == "r6"
            continue
        logits = logits_alone(model, [*prompt, *a.token_ids[:first]], a.tiers[first])
        for token_id in (a.token_ids[first], b.token_ids[first]):
            num_ties(logits, np.array([token_id]), tolerance)
        num_parted += 1
    assert num_parted <= 1
