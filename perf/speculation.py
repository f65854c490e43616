"""Self-speculation with adaptive lengths against plain decode at the top tier, in turns, at several
batch sizes; beside it the ceiling that the machine's own passes allow.

The ceiling is the best fixed length by (1 - α^(γ+1)) / (1 - α) tokens for γ draft passes and one
verification, with the measured acceptance α and the measured times of these steps.
Usage: python perf/speculation.py ENGINE TEXT [--draft TIER …] [--out FILE]
"""

import argparse
import itertools
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from report import finish, show, spread

from mfs_trt.engine.threads import wait_passively

NUM_PROMPT_TOKENS = 32
FIXED = (1, 2, 4, 6, 8, 12)


class Speculation:
    """One engine on which batches of requests run, with drafts and without."""

    def __init__(self, engine_dir: str, text: str, drafts: tuple[str, ...], length: int) -> None:
        from mfs_trt.serving.core import load_core

        self.core = load_core(engine_dir)
        assert self.core.tokenizer is not None
        self._tokens = self.core.tokenizer.encode(text)
        self._drafts = drafts or (self.core.family.tiers[0].name,)
        self._length = length
        self._ids = itertools.count()
        self._rng = np.random.default_rng(0)

    def prompts(self, batch: int) -> list[list[int]]:
        starts = self._rng.integers(0, len(self._tokens) - NUM_PROMPT_TOKENS, batch)
        return [self._tokens[i : i + NUM_PROMPT_TOKENS] for i in starts]

    def run(self, prompts: list[list[int]], num_drafts: int | None, is_plain: bool) -> dict:
        """Seconds a token of every request, steps' seconds by depth and length, drafts' fate."""
        from mfs_trt.request import PromptRequest
        from mfs_trt.sampling_params import SamplingParams

        core, requests = self.core, []
        for prompt in prompts:
            asked = PromptRequest(
                str(next(self._ids)),
                SamplingParams(max_tokens=self._length, ignore_eos=True),
                token_ids=prompt,
                draft_tiers=() if is_plain else self._drafts,
                num_speculative_tokens=num_drafts,
                reuse_prefix=False,
            )
            requests += core.make_requests(asked)
        for request in requests:
            core.add(request)
        while not all(r.num_output_tokens for r in requests):
            core.step()
        before = sum(r.num_output_tokens for r in requests)
        steps: dict[int, list[float]] = defaultdict(list)  # by rows of the deepest segment
        rows = list(core.scheduler.num_rows)
        started = time.perf_counter()
        while len(core.scheduler.requests) == len(requests):
            core.step()
            steps[core.scheduler.num_rows[-1] - rows[-1]].append(core.last_step_duration_s)
            rows = list(core.scheduler.num_rows)
        seconds = time.perf_counter() - started
        tokens = sum(r.num_output_tokens for r in requests) - before
        while core.has_requests:
            core.step()
        drafted = sum(r.num_drafted for r in requests)
        accepted = sum(r.num_drafts_accepted for r in requests)
        return {"token_s": seconds / tokens, "steps": steps, "fate": (drafted, accepted)}


def share_that_stands(fates: list[tuple[int, int]]) -> float:
    """Acceptance of one draft, from rounds of one draft each."""
    drafted, accepted = np.sum(fates, axis=0)
    return float(accepted / max(1, drafted))


def ceiling(spec: Speculation, batch: int, rounds: int) -> dict[str, Any]:
    """Best ratio over fixed lengths, by the measured times of passes."""
    times: dict[str, list[float]] = defaultdict(list)
    fates = []
    for _ in range(rounds):
        prompts = spec.prompts(batch)
        plain = spec.run(prompts, None, True)
        times["plain"] += plain["steps"][batch]
        for length in FIXED:
            run = spec.run(prompts, length, False)
            times["draft"] += run["steps"][0]
            times[f"verify {length}"] += run["steps"][batch * (length + 1)]
            if length == 1:
                fates.append(run["fate"])
    share = share_that_stands(fates)
    found = {name: float(np.median(values)) for name, values in times.items() if values}
    ratios = {}
    for length in FIXED:
        if f"verify {length}" in found:
            spent = length * found["draft"] + found[f"verify {length}"]
            got = sum(share**i for i in range(length + 1))
            ratios[length] = got * found["plain"] / spent
    best = max(ratios, key=lambda n: ratios[n])
    millis = {name: 1000 * value for name, value in found.items()}
    return {"acceptance": share, "ratio": ratios[best], "length": best, "pass_ms": millis}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("text", type=Path)
    parser.add_argument("--draft", nargs="*", default=())
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 4, 16))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-ceiling", action="store_true", help="leave fixed lengths out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    spec = Speculation(args.engine, args.text.read_text(), tuple(args.draft), args.tokens)
    result: dict[str, Any] = {"benchmark": "speculation", "engine": Path(args.engine).name}
    result["tiers"] = {t.name: t.exit_layer for t in spec.core.family.tiers}
    rows = []
    for batch in args.batches:
        spec.run(spec.prompts(batch), None, False)  # the first one warms up
        ratios, fates = [], []
        for _ in range(args.rounds):
            prompts = spec.prompts(batch)
            plain = spec.run(prompts, None, True)
            drafting = spec.run(prompts, None, False)
            ratios.append(plain["token_s"] / drafting["token_s"])
            fates.append(drafting["fate"])
        drafted, accepted = np.sum(fates, axis=0).tolist()
        top = {"ratio": float("nan"), "length": 0, "acceptance": float("nan")}
        if not args.no_ceiling:
            top = ceiling(spec, batch, max(2, args.rounds // 3))
        result[f"batch {batch}"] = {
            "ratio": spread(ratios),
            "drafted": drafted,
            "accepted": accepted,
            "ceiling": top,
        }
        rows.append((batch, spread(ratios)["median"], top["ratio"], top["length"],
                     top["acceptance"], accepted / max(1, drafted)))  # fmt: skip
    show(
        "tokens a second with drafts over without",
        ["batch", "ratio", "ceiling", "at length", "acceptance of one", "of all made"],
        rows,
    )
    finish(result, args.out)


if __name__ == "__main__":
    main()
