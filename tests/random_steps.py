"""Random step inputs: requests whose segments compute their tokens at different times."""

from dataclasses import replace

import numpy as np

from mfs_trt.engine.interface import SegmentInput, StepInput
from steps import Item, Steps

CHUNKS = (1, 1, 1, 2, 7, 31, 32, 33, 64)


class RandomSteps:
    """`next()` is a step that any engine with the family and the frames of `steps` can run.

    Every segment of every request is somewhere else: it takes rows from the segment below in the
    same step or from kept features, computes new tokens, and at times some of those that exist
    already again (slot -1). Requests lie in any order; some rows have logits.
    """

    def __init__(self, steps: Steps, seed: int) -> None:
        self._steps = steps
        self._random = np.random.default_rng(seed)
        num_requests, self._num_tokens = steps.ids.shape
        self.num_computed = np.zeros((num_requests, len(steps.tables)), int)

    def next(self) -> StepInput:
        below: list[Item] = []
        segments: list[SegmentInput | None] = []
        while not any(segments):
            segments, computed = [], self.num_computed.copy()
            for s in range(computed.shape[1]):
                items = self._items(s, computed)
                segments.append(self._rows(s, items, below) if items else None)
                if s == 0:
                    input_ids = self._steps.input_ids(items)
                below = items
        self.num_computed = computed
        return StepInput(input_ids, tuple(segments))

    @property
    def is_done(self) -> bool:
        return bool((self.num_computed == self._num_tokens).all())

    def _items(self, segment: int, computed: np.ndarray) -> list[Item]:
        """Chooses items and counts their new tokens as computed."""
        items = []
        for request in self._random.permutation(len(computed)):
            if self._random.random() < 0.3:
                continue
            begin = int(computed[request, segment])
            known = self._num_tokens if segment == 0 else int(computed[request, segment - 1])
            end = min(known, begin + int(self._random.choice(CHUNKS)))
            first = begin
            if self._random.random() < 0.3:
                first = max(0, begin - int(self._random.choice(CHUNKS)))
                if self._random.random() < 0.5:  # nothing new: all of it exists already
                    end = int(self._random.integers(first, begin + 1))
            if first < end:
                items.append((int(request), first, end))
                computed[request, segment] = max(begin, end)
        return items

    def _rows(self, segment: int, items: list[Item], below: list[Item]) -> SegmentInput:
        request = np.concatenate([np.full(last - first, r) for r, first, last in items])
        rows = self._steps.rows(segment, items)
        is_new = rows.positions >= self.num_computed[request, segment]
        has_pool = segment < self.num_computed.shape[1] - 1
        slots = (request * self._num_tokens + rows.positions).astype(np.int32)
        wanted = self._random.permutation(len(request))[: self._random.integers(0, 17)]
        return replace(
            rows,
            source_rows=self._sources(segment, request, rows.positions, below),
            slot_mapping=np.where(is_new[:, None], rows.slot_mapping, np.int32(-1)),
            save_features=np.where(is_new & has_pool, slots, np.int32(-1)),
            exit_rows=wanted.astype(np.int32),
        )

    def _sources(
        self, segment: int, request: np.ndarray, positions: np.ndarray, below: list[Item]
    ) -> np.ndarray:
        """Rows of this step, or kept features where there is none, and at times where there is."""
        if segment == 0:
            return np.arange(len(positions), dtype=np.int32)
        tokens = [(r, p) for r, first, last in below for p in range(first, last)]
        row_of = {token: row for row, token in enumerate(tokens)}
        sources = []
        for r, p in zip(request.tolist(), positions.tolist(), strict=True):
            row = row_of.get((r, p))
            was_kept = p < self.num_computed[r, segment - 1]
            if row is None or (was_kept and self._random.random() < 0.3):
                row = -1 - (r * self._num_tokens + p)
            sources.append(row)
        return np.array(sources, np.int32)
