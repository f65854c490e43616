"""What narrow numbers cost: perplexity of the top tier on a local text, for each engine folder
given.

The text is cut into windows that each start with an empty context; every token but a window's first
is predicted. Usage: python perf/quality.py TEXT ENGINE [ENGINE …] [--out FILE]; the first engine is
the yardstick.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from report import finish, show

from mfs_trt.engine.threads import wait_passively

CHUNK_TOKENS = 32


def window_loss(core, token_ids: list[int]) -> float:
    """Summed negative log-likelihood, in nats, of tokens 1… given those before.

    In chunks, so that most of what a token sees was read back from the KV arena.
    """
    from mfs_trt.request import PromptRequest
    from mfs_trt.sampling_params import SamplingParams
    from mfs_trt.scheduler.batch import prepare

    scheduler = core.scheduler
    scheduler.limits = replace(core.limits, max_num_batched_tokens=CHUNK_TOKENS)
    request = PromptRequest("window", SamplingParams(max_tokens=1), token_ids=token_ids)
    for sequence in core.make_requests(request):
        core.add(sequence)
    block_size, tables = scheduler.kv_cache.spec.block_size, scheduler.kv_cache.tables
    loss, done = 0.0, 0
    while done < len(token_ids):
        output = scheduler.schedule()
        step = prepare(output, tables, block_size)
        rows = np.arange(len(step.input_ids), dtype=np.int32)
        top = replace(step.segments[-1], exit_rows=rows)
        step = replace(step, segments=(*step.segments[:-1], top))
        logits = core.engine.execute(step).logits[-1].astype(np.float64)
        scheduler.update(output, {})
        targets = token_ids[done + 1 : done + 1 + len(rows)]
        logits = logits[: len(targets)]
        peak = logits.max(axis=1)
        log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        loss += float((log_sum - logits[np.arange(len(targets)), targets]).sum())
        done += len(rows)
    core.abort("window")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wait_passively()
    from mfs_trt.engine.manifest import EngineManifest
    from mfs_trt.serving.core import load_core

    result: dict = {"benchmark": "quality", "text": args.text.name, "window": args.window}
    rows = []
    for folder in args.engines:
        core = load_core(folder)
        ids = core.tokenizer.encode(args.text.read_text(encoding="utf-8"))
        windows = [ids[i : i + args.window] for i in range(0, len(ids), args.window)]
        windows = [w for w in windows if len(w) == args.window][: args.windows]
        losses = [window_loss(core, w) / (args.window - 1) for w in windows]
        core.engine.close()
        manifest = EngineManifest.load(folder)
        name = ", ".join(
            (
                f"compute {manifest.dtype}",
                f"weights {manifest.weight_format or manifest.dtype}",
                f"KV {manifest.kv_dtype or manifest.dtype}",
            )
        )
        perplexity = float(np.exp(np.mean(losses)))
        first = result.setdefault("yardstick", perplexity)
        result[name] = {"perplexity": perplexity, "change": perplexity / first - 1}
        rows.append((name, perplexity, f"{100 * (perplexity / first - 1):+.2f} %"))
    result["num_windows"] = len(windows)
    show(
        f"perplexity of the top tier, {len(windows)} windows",
        ["engine", "perplexity", "change"],
        rows,
    )
    finish(result, args.out)


if __name__ == "__main__":
    main()
