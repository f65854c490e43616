"""Pacing and drafting that choose anything: what they choose must not change a token."""

import random

from mfs_trt.request import Request
from mfs_trt.scheduler.step_cost import StepWork


class Whims:
    """Takes the place of a `Pacing`, of its cost model and of a `Drafting`, with seeded choices."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lengths: dict[str, tuple[int, ...]] = {}

    @property
    def cost(self) -> "Whims":
        return self

    def spare_seconds(self, decodes: StepWork, num_decodes: int, num_prompts: int) -> float | None:
        return self._rng.choice([None, 0.0, 1.0])

    def rows_within(self, seconds: float, context: int) -> int:
        return self._rng.randint(0, 9)

    def row_seconds(self, num_rows: int, context: int) -> float:
        return 0.1

    def choose(self, running: list[Request]) -> None:
        for request in running:
            lengths = [self._rng.choice([0, 1, 1, 2, 4]) for _ in request.draft_levels]
            self._lengths[request.request_id] = tuple(lengths)

    def lengths(self, request: Request) -> tuple[int, ...]:
        return self._lengths.get(request.request_id, (3,) * len(request.draft_levels))

    def observe(self, request: Request, level: int, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts and level < len(request.draft_levels)

    def forget(self, request: Request) -> None:
        self._lengths.pop(request.request_id, None)
