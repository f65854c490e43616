"""Every kernel equals its reference: in OpenAI Triton's interpreter, and on a GPU where there is
one.

The interpreter computes on CPU tensors, in float32 and float16; bfloat16 it cannot.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from mfs_trt.plugins import reference
from mfs_trt.plugins.registry import OPERATORS, load_launcher

# Of the largest value, against the reference in float64.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU in this process"
)


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu-float32", marks=interpreted),
        pytest.param(("cpu", torch.float16), id="cpu-float16", marks=interpreted),
        pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16), id="cuda-float16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
    ]
)
def on(request) -> "On":
    return On(*request.param)


@dataclass(frozen=True)
class On:
    """Where and in what type a case runs; its inputs are drawn on the CPU."""

    device: str
    dtype: torch.dtype

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    def index(self, values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype is self.dtype
        size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        tolerance = TOLERANCES[self.dtype] * size
        torch.testing.assert_close(
            actual.double().cpu(), expected.double().cpu(), rtol=0, atol=tolerance
        )


@dataclass(frozen=True)
class Attention:
    """A batch: `lengths[r]` tokens of request r, of which the last `rows[r]` are computed."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    lengths: Sequence[int]
    rows: Sequence[int]
    window: int | None = None
    num_splits: int = 1
    tile_rows: int | None = None


ATTENTION = {
    "one token each": Attention(4, 2, 64, 8, [1, 1, 1], [1, 1, 1]),
    "decode": Attention(9, 3, 64, 32, [33, 1, 32, 95], [1, 1, 1, 1]),
    "one head": Attention(1, 1, 128, 16, [50, 17], [1, 17]),
    "40 heads, each its own": Attention(40, 40, 80, 64, [40], [1]),
    "40 heads on one": Attention(40, 1, 96, 8, [41], [2]),
    "chunks beside decode": Attention(8, 2, 80, 16, [40, 100, 7, 64], [40, 1, 0, 33]),
    "chunks in large tiles": Attention(6, 2, 96, 24, [40, 100, 64], [40, 1, 33], tile_rows=64),
    "window": Attention(4, 2, 64, 16, [70, 100], [40, 1], window=9),
    "window over large tiles": Attention(2, 2, 64, 8, [150], [80], window=33, tile_rows=64),
    "split": Attention(5, 1, 128, 16, [200, 3, 130], [1, 1, 2], num_splits=3),
    "split with a window": Attention(4, 2, 64, 32, [300, 90], [1, 9], window=70, num_splits=2),
    "more splits than keys": Attention(2, 1, 64, 8, [5], [1], num_splits=8),
    "4k context": Attention(2, 1, 64, 64, [4096], [1]),
    "4k context, split": Attention(2, 1, 128, 32, [4096], [1], num_splits=3),
}


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_paged_attention_equals_its_reference(on, case):
    batch = AttentionBatch(on, case)
    actual = batch.launch()
    expected = batch.expected()
    on.close(actual, expected)


@pytest.mark.parametrize("case", [ATTENTION["chunks beside decode"], ATTENTION["split"]])
def test_paged_attention_reads_no_slot_beyond_a_request(on, case):
    batch = AttentionBatch(on, case)
    expected = batch.expected()
    used = torch.zeros(batch.key_cache.shape[0], case.block_size, dtype=torch.bool)
    for r, length in enumerate(case.lengths):
        slots = torch.arange(length)
        frames = batch.tables[r, :, 1].long().cpu()[slots // case.block_size]
        used[frames, slots % case.block_size] = True
    for cache in (batch.key_cache, batch.value_cache):
        cache.transpose(1, 2)[~used.to(on.device)] = float("nan")
    on.close(batch.launch(), expected)


class AttentionBatch:
    """Inputs of a case; the frames of a request lie in no order, in the second of two groups."""

    def __init__(self, on: On, case: Attention) -> None:
        self.case = case
        num_reqs = len(case.lengths)
        max_blocks = max(-(-n // case.block_size) for n in case.lengths) + 1
        num_frames = 2 * num_reqs * max_blocks + 1
        frames = 1 + torch.randperm(num_frames - 1)
        self.tables = on.index(frames.reshape(num_reqs, max_blocks, 2))
        shape = (num_frames, case.kv_heads, case.block_size, case.head_dim)
        self.key_cache, self.value_cache = on.random(*shape), on.random(*shape)
        self.query = on.random(sum(case.rows), case.heads, case.head_dim)
        self.starts = [sum(case.rows[:r]) for r in range(num_reqs + 1)]
        self.on, self.scale = on, case.head_dim**-0.5

    def launch(self) -> torch.Tensor:
        case = self.case
        return load_launcher("paged_attention")(
            self.query,
            self.key_cache,
            self.value_cache,
            self.tables,
            self.on.index(self.starts),
            self.on.index(case.lengths),
            self.scale,
            case.window,
            group=1,
            num_splits=case.num_splits,
            tile_rows=case.tile_rows,
        )

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(
            self.query.double().cpu(),
            self.key_cache.double().cpu(),
            self.value_cache.double().cpu(),
            self.tables[:, :, 1].long().cpu(),
            self.starts,
            self.case.lengths,
            self.scale,
            self.case.window,
        )


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size"), [(1, 64, 8), (3, 80, 16), (40, 96, 24), (5, 128, 64)]
)
def test_kv_write_equals_its_reference(on, kv_heads, head_dim, block_size):
    num_frames, num_rows = 5, 7
    caches = [on.random(num_frames, kv_heads, block_size, head_dim) for _ in range(2)]
    values = [on.random(num_rows, kv_heads, head_dim) for _ in range(2)]
    slots = torch.randperm(num_frames * block_size)[: 2 * num_rows].reshape(num_rows, 2)
    slots[2, 1] = slots[5, 1] = -1
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, values, strict=True):
        reference.kv_write(cache, rows, slots[:, 1].to(on.device))
    load_launcher("kv_write")(*values, on.index(slots), *caches, group=1)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("hidden_size", [24, 576, 5120])
def test_tier_exit_equals_its_reference(on, hidden_size):
    hidden, gains = on.random(6, hidden_size), on.random(3, hidden_size)
    rows, tiers = on.index([5, 0, 0, 3]), on.index([2, 0, 1, 2])
    actual = load_launcher("tier_exit")(hidden, rows, tiers, gains, 1e-5)
    on.close(actual, reference.tier_exit(hidden, rows.long(), tiers.long(), gains, 1e-5))


def test_tier_exit_of_no_rows_is_empty(on):
    none = on.index([])
    out = load_launcher("tier_exit")(on.random(3, 24), none, none, on.random(1, 24), 1e-5)
    assert out.shape == (0, 24)


# Runs of rows with their variant; 0 is the base.
RUNS = {
    "base alone": [(3, 0)],
    "one row": [(1, 2)],
    "mixed": [(2, 0), (17, 1), (1, 3), (5, 0), (16, 2)],
    "empty runs": [(0, 1), (4, 2), (0, 0), (0, 3), (15, 3), (0, 2)],
}
SIZES = {"narrow": (24, 65, 1), "rank 8": (576, 192, 8), "rank 70": (1100, 130, 70)}


@pytest.mark.parametrize(
    ("size", "runs"),
    [*(("narrow", runs) for runs in RUNS), ("rank 8", "mixed"), ("rank 70", "empty runs")],
)
def test_variant_delta_equals_its_reference(on, size, runs):
    batch = DeltaBatch(on, RUNS[runs], *SIZES[size])
    actual = batch.launch()
    on.close(actual, batch.expected())
    for begin, end, variant in batch.runs():
        if variant == 0:
            assert torch.equal(actual[begin:end], batch.y[begin:end])


def test_a_row_gets_the_same_bits_of_a_delta_in_any_batch(on):
    batch = DeltaBatch(on, RUNS["mixed"], *SIZES["rank 8"])
    together = batch.launch()
    for row, variant in ((2, 1), (18, 1), (19, 3), (40, 2)):
        alone = batch.y[row : row + 1].clone()
        load_launcher("variant_delta")(
            alone,
            batch.x[row : row + 1],
            batch.a,
            batch.b,
            on.index([0, 1]),
            on.index([variant]),
        )
        assert torch.equal(alone[0], together[row])


class DeltaBatch:
    def __init__(self, on: On, runs, in_size: int, out_size: int, rank: int) -> None:
        self.on = on
        self.variants = [variant for _, variant in runs]
        self.starts = [sum(n for n, _ in runs[:i]) for i in range(len(runs) + 1)]
        num_rows = self.starts[-1]
        self.y, self.x = on.random(num_rows, out_size), on.random(num_rows, in_size)
        self.a = (on.random(3, in_size, rank) / in_size**0.5).contiguous()
        self.b = (on.random(3, rank, out_size) / rank**0.5).contiguous()

    def runs(self) -> list[tuple[int, int, int]]:
        return list(zip(self.starts, self.starts[1:], self.variants, strict=False))

    def launch(self) -> torch.Tensor:
        y = self.y.clone()
        index = self.on.index
        load_launcher("variant_delta")(
            y, self.x, self.a, self.b, index(self.starts), index(self.variants)
        )
        return y

    def expected(self) -> torch.Tensor:
        wide = [t.double().cpu() for t in (self.y, self.x, self.a, self.b)]
        reference.variant_delta(*wide, self.starts, self.variants)
        return wide[0]


def test_every_operator_names_a_parity_test_of_this_file():
    assert all(operator.parity_test in globals() for operator in OPERATORS.values())
