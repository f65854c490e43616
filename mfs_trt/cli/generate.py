"""`mfs-trt generate`: one prompt, offline, at one tier or at all of them side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mfs_trt.llm import LLM
from mfs_trt.sampling_params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or to answer with --chat.")],
    model: Annotated[
        Path, typer.Option("--model", "-m", help="An engine or family folder.")
    ] = Path("family"),
    tier: Annotated[
        str | None, typer.Option(help="Tier to run at; the deepest by default.")
    ] = None,
    compare_tiers: Annotated[
        bool, typer.Option("--compare-tiers", help="Run all tiers in one batch, side by side.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Greedy when absent or 0.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus size.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
) -> None:
    """Stream the continuation of PROMPT."""
    llm = LLM(model)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    source: dict = (
        {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    )
    if compare_tiers:
        _compare(llm, params, source)
        return
    for event in llm.stream(params=params, tier=tier, **source):
        print(event.text, end="", flush=True)
    print()


def _compare(llm: LLM, params: SamplingParams, source: dict) -> None:
    """One column per tier, filled as tokens come."""
    names = [t.name for t in llm.family.tiers]
    texts = dict.fromkeys(names, "")

    def table() -> Table:
        columns = [
            f"{t.name}: {t.exit_layer} of {llm.family.model.num_layers} layers"
            for t in llm.family.tiers
        ]
        grid = Table(*columns, expand=True)
        grid.add_row(*texts.values())
        return grid

    console = Console()
    with Live(table(), console=console, refresh_per_second=8) as live:
        for event in llm.stream(params=params, tier=names, **source):
            texts[event.tier] += event.text
            live.update(table())
