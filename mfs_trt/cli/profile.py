"""`mfs-trt profile`: latency and loss of every depth on this machine, and exits to match."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mfs_trt.cli.eval import held_out_tokens
from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.latency import Workload
from mfs_trt.evaluation.profile import (
    Profile,
    candidate_depths,
    model_latency,
    plot_profile,
    profile_latencies,
    profile_losses,
    wanted_depths,
)
from mfs_trt.evaluation.proposal import LOWEST_QUALITY, propose_exits
from mfs_trt.weights.store import WeightStore

DEFAULT_FRACTIONS = (0.5, 0.75)  # of the depth, when nothing says how fast a tier should be

console = Console()


def profile(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    out: Annotated[Path, typer.Option(help="The folder for profile.json and profile.png.")] = Path(
        "profile"
    ),
    like: Annotated[
        list[Path] | None,
        typer.Option(help="A checkpoint that a tier should be as fast as; several times."),
    ] = None,
    tokens_per_s: Annotated[
        list[float] | None, typer.Option(help="A decoding speed to reach; several times.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Held-out text; without it no losses are measured.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(help="Sequences of data to look at.")] = 16,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    text_key: Annotated[str, typer.Option(help="Key of the text in JSONL and parquet.")] = "text",
    target: Annotated[str, typer.Option(help="The engine: openvino, reference.")] = "openvino",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the measured prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated behind each.")] = 16,
    rounds: Annotated[int, typer.Option(help="Measured requests per depth.")] = 5,
) -> None:
    """Measure every depth of FAMILY and propose exits, a shallow draft tier among them."""
    workload = _workload(prompt_tokens, output_tokens, rounds)
    for speed in tokens_per_s or []:
        if speed <= 0:
            raise ConfigError(f"tokens_per_s: expected above 0, got {speed:g}")
    store = WeightStore(family)
    spec = store.spec
    depths = candidate_depths(spec)
    with console.status(f"measuring {len(depths)} depths"):
        latencies = profile_latencies(store, depths, workload, target)
    others = []
    for path in like or []:
        with console.status(f"measuring {path.name}"):
            others.append((path.name, model_latency(path, spec.dtype, workload, target)))
    evaluation = None
    if data is not None:
        tokens = held_out_tokens(spec, family, data, seq_length, text_key)
        with console.status("evaluating exits"):
            evaluation = profile_losses(store, depths, tokens, max_sequences)
    num_layers = spec.model.num_layers
    wanted = wanted_depths(latencies, workload, like=others, tokens_per_s=tokens_per_s or ())
    if not wanted:
        wanted = tuple((f"{f:.0%} of the depth", f * num_layers) for f in DEFAULT_FRACTIONS)
    found = Profile(
        family=str(family),
        revision=spec.revision,
        num_layers=num_layers,
        target=target,
        workload=workload,
        latencies=latencies,
        evaluation=evaluation,
        wanted=wanted,
        # The top tier serves who can wait for it; no tier serves who cannot wait for one layer.
        proposal=propose_exits(num_layers, [d for _, d in wanted if 0 < round(d) < num_layers]),
    )
    out.mkdir(parents=True, exist_ok=True)
    plot_profile(found, out / "profile.png")
    text = json.dumps(found.to_json(), indent=1) + "\n"
    (out / "profile.json").write_text(text, encoding="utf-8")
    _print(found)
    console.print(f"profile: {out}", highlight=False)


def _workload(prompt_tokens: int, output_tokens: int, rounds: int) -> Workload:
    least = {"prompt_tokens": (prompt_tokens, 1), "output_tokens": (output_tokens, 2)}
    for name, (value, minimum) in {**least, "rounds": (rounds, 1)}.items():
        if value < minimum:
            raise ConfigError(f"{name}: expected at least {minimum}, got {value}")
    return Workload(prompt_tokens, output_tokens, rounds)


def _print(found: Profile) -> None:
    table = Table(title=f"one request of {found.workload.prompt_tokens} tokens on {found.target}")
    columns = ["layers", "prefill ms", "ms per token", "tokens/s"]
    columns += ["loss", "acceptance"] if found.evaluation else []
    for column in columns:
        table.add_column(column, justify="right")
    for row in found.to_json()["depths"]:
        cells = [str(row["num_layers"]), f"{row['prefill_ms']:.1f}", f"{row['decode_ms']:.2f}"]
        cells.append(f"{row['tokens_per_s']:.1f}")
        if found.evaluation:
            share = row["acceptance"]
            cells += [f"{row['loss']:.3f}", "" if share is None else f"{share:.3f}"]
        table.add_row(*cells)
    console.print(table)
    for reason, depth in found.wanted:
        console.print(f"{reason}: {_reading(depth, found.num_layers)}", highlight=False)
    console.print(
        f"proposed: --tiers {found.proposal.to_tiers()}  "
        f"(layer groups of {found.proposal.group_size})",
        highlight=False,
    )


def _reading(depth: float, num_layers: int) -> str:
    if depth == 0:
        return "not even one layer is so fast here"
    text = f"{depth:.1f} of {num_layers} layers"
    if depth < LOWEST_QUALITY * num_layers:
        return f"{text}; below half of the depth a tier drafts well and answers badly"
    return text
