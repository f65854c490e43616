"""Steps on one engine: flat step inputs from (request, first token, last token) items."""

from collections.abc import Sequence

import numpy as np

from mfs_trt.engine.interface import Engine, SegmentInput, StepInput, StepOutput

Item = tuple[int, int, int]  # request, first token, last token


class Steps:
    """Each request owns fixed frames and fixed feature slots, `request * tokens + position`.

    `ids` [num_requests, tokens] int32 are the requests' tokens; a whole number of blocks each.
    """

    def __init__(self, engine: Engine, ids: np.ndarray) -> None:
        self.engine, self.ids = engine, ids
        self.block_size = engine.kv_spec.block_size
        num_requests, num_tokens = ids.shape
        num_blocks = num_tokens // self.block_size
        frames = np.arange(1, engine.kv_spec.num_frames, dtype=np.int32)
        self.tables = []  # per segment [requests, blocks, m]
        for m in engine.family.groups_per_segment:
            count = num_requests * num_blocks * m
            assert count <= len(frames), "the engine has too few frames for these requests"
            # Not ascending, so that the order of frames cannot stand in for the table.
            self.tables.append(frames[:count][::-1].reshape(num_requests, num_blocks, m))
            frames = frames[count:]

    def rows(
        self, segment: int, items: Sequence[Item], source_rows: Sequence[int] | None = None
    ) -> SegmentInput:
        """The items' rows in segment `segment`, all of them with logits."""
        request = np.concatenate([np.full(last - first, r) for r, first, last in items])
        positions = np.concatenate([np.arange(first, last) for _, first, last in items])
        frames = self.tables[segment][request, positions // self.block_size]
        num_rows = len(positions)
        if source_rows is None:
            source_rows = range(num_rows)
        slots = frames * self.block_size + (positions % self.block_size)[:, None]
        return SegmentInput(
            source_rows=np.asarray(source_rows, np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=slots.astype(np.int32),
            query_start_loc=np.cumsum([0, *(b - a for _, a, b in items)], dtype=np.int32),
            seq_lens=np.array([last for *_, last in items], np.int32),
            block_tables=self.tables[segment][[r for r, *_ in items]],
            variant_ids=np.zeros(num_rows, np.int32),
            save_features=np.full(num_rows, -1, np.int32),
            exit_rows=np.arange(num_rows, dtype=np.int32),
        )

    def step(self, *items: Item, tiers: Sequence[int] | None = None) -> list[np.ndarray | None]:
        """One step, the items in the order given, deepest first; logits per segment, copied."""
        num_segments = len(self.tables)
        tiers = tiers or [num_segments - 1] * len(items)
        segments = []
        for s in range(num_segments):
            deep = [item for item, tier in zip(items, tiers, strict=True) if tier >= s]
            segments.append(self.rows(s, deep) if deep else None)
        logits = self.execute(items, segments).logits
        return [None if rows is None else rows.copy() for rows in logits]

    def execute(self, items: Sequence[Item], segments: Sequence[SegmentInput | None]) -> StepOutput:
        """Run prepared rows; `items` are those of segment 0."""
        return self.engine.execute(StepInput(self.input_ids(items), tuple(segments)))

    def input_ids(self, items: Sequence[Item]) -> np.ndarray:
        """[num_rows] int32, the items' tokens."""
        none = np.zeros(0, np.int32)
        return np.concatenate([none, *(self.ids[r, first:last] for r, first, last in items)])


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def num_ties(logits: np.ndarray, token_ids: np.ndarray, tolerance: float = 1e-5) -> int:
    """Rows whose token is not the most likely one by `logits`, all of them ties.

    Two tokens tie when their logits differ by less than `tolerance` of the logits' spread.
    """
    highest = logits.max(axis=1)
    gap = (highest - logits[np.arange(len(token_ids)), token_ids]) / logits.std(axis=1)
    assert (gap < tolerance).all(), f"not the most likely tokens: {gap.max()} below"
    return int((gap > 0).sum())
