"""A core whose requests all decode: what a measurement of decode steps runs.

Modules that load OpenMP are imported late: how its threads wait is chosen before.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mfs_trt.serving.core import EngineCore

PROMPT_TOKENS = 64


class Decoding:
    """One request a tier of `tiers` (None: the default), past its prompt, until `close`."""

    def __init__(self, core: "EngineCore", tiers: Sequence[str | None]) -> None:
        from mfs_trt.request import PromptRequest
        from mfs_trt.sampling_params import SamplingParams

        self._core, self._ids = core, [f"decoding {i}" for i in range(len(tiers))]
        longest = core.limits.max_model_len - PROMPT_TOKENS
        params = SamplingParams(max_tokens=longest, ignore_eos=True)
        vocab_size = core.family.model.vocab_size
        for i, (request_id, tier) in enumerate(zip(self._ids, tiers, strict=True)):
            ids = [(5 + 7 * i + j) % vocab_size for j in range(PROMPT_TOKENS)]
            request = PromptRequest(request_id, params, token_ids=ids, tier=tier)
            for sequence in core.make_requests(request):
                core.add(sequence)
        while any(r.num_output_tokens < 2 for r in core.scheduler.requests.values()):
            core.step()
        self._execute = core.engine.execute
        core.engine.execute = self._timed

    def _timed(self, step):
        started = time.perf_counter()
        output = self._execute(step)
        self._engine_ms = 1000 * (time.perf_counter() - started)
        num_exits = sum(len(ids) for ids in output.token_ids if ids is not None)
        if num_exits != len(self._ids):
            raise RuntimeError(f"a step of {num_exits} requests, expected {len(self._ids)}")
        return output

    def step_ms(self) -> tuple[float, float]:
        """One step of every request: milliseconds of it all, and of the engine alone."""
        started = time.perf_counter()
        self._core.step()
        return 1000 * (time.perf_counter() - started), self._engine_ms

    def close(self) -> None:
        self._core.engine.execute = self._execute
        for request_id in self._ids:
            self._core.abort(request_id)
