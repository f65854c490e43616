"""`mfs-trt eval`: held-out loss per tier, agreement of tiers, quality gates, a report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mfs_trt.dtypes import torch_dtype
from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.evaluation import Evaluation, evaluate_model
from mfs_trt.evaluation.gates import check_gates, parse_gate, with_changes
from mfs_trt.evaluation.report import Report, read_metrics, write_report
from mfs_trt.family.spec import FamilySpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.documents import read_documents
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.tokenizer import Tokenizer
from mfs_trt.weights.store import WeightStore

GATES_FAILED = 3  # exit status

console = Console()


def evaluate(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    data: Annotated[
        Path, typer.Option(help="Held-out text, JSONL or parquet file, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="The report folder.")] = Path("report"),
    gate: Annotated[
        list[str] | None,
        typer.Option(help="A condition, as 'loss.small<=3.2'; may be given several times."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier report, for gates as 'change.loss.large<=0.01'."),
    ] = None,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    max_sequences: Annotated[
        int | None, typer.Option(help="Look at no more sequences than this.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    text_key: Annotated[str, typer.Option(help="Key of the text in JSONL and parquet.")] = "text",
) -> None:
    """Measure every tier of FAMILY on held-out data; exit status 3 when a gate is not met."""
    gates = [parse_gate(text) for text in gate or []]
    earlier = read_metrics(baseline) if baseline is not None else {}
    store = WeightStore(family)
    tokens = held_out_tokens(store.spec, family, data, seq_length, text_key)
    model = NestedModel.from_store(store, seq_length, torch_dtype(dtype)).to(device)
    with console.status(f"evaluating {tokens.num_sequences} sequences"):
        found = evaluate_model(model, tokens, max_sequences=max_sequences, batch_size=batch_size)
    metrics = with_changes(found.metrics(), earlier)
    report = Report(
        family=str(family),
        spec=store.spec,
        data=data.name,
        seq_length=seq_length,
        num_sequences=min(tokens.num_sequences, max_sequences or tokens.num_sequences),
        dtype=dtype,
        evaluation=found,
        metrics=metrics,
        gates=check_gates(gates, metrics),
    )
    write_report(report, out)
    console.print(_tier_table(found))
    for result in report.gates:
        verdict = "[green]pass[/green]" if result.is_passed else "[red]FAIL[/red]"
        console.print(f"{verdict}  {result.gate}  ({result.value:.4g})")
    console.print(f"report: {out}", highlight=False)
    if not report.is_passed:
        raise typer.Exit(GATES_FAILED)


def held_out_tokens(
    spec: FamilySpec, family: Path, data: Path, seq_length: int, text_key: str
) -> PackedTokens:
    """The data packed to `seq_length`; raises `ConfigError` where the model has no such context."""
    if seq_length > spec.model.max_position_embeddings:
        raise ConfigError(
            f"seq_length: expected at most the model's {spec.model.max_position_embeddings}, "
            f"got {seq_length}"
        )
    tokenizer = Tokenizer(family)
    ends = spec.end_token_ids or tokenizer.end_token_ids
    if not ends:
        raise ConfigError(f"{family}: expected an end token to join documents by, it has none")
    documents = read_documents(data, tokenizer, text_key=text_key)
    return PackedTokens.from_documents(documents, seq_length, seed=0, end_token_id=ends[0])


def _tier_table(found: Evaluation) -> Table:
    """Losses, and how each tier drafts for the deepest."""
    table = Table("tier", title="held-out data")
    for column in ("layers", "loss", "perplexity", "greedy agreement", "acceptance"):
        table.add_column(column, justify="right")
    top = found.losses[-1].tier
    pairs = {pair.draft: pair for pair in found.pairs if pair.target == top}
    for row in found.losses:
        pair = pairs.get(row.tier)
        with_top = (f"{pair.greedy_agreement:.3f}", f"{pair.acceptance:.3f}") if pair else ("", "")
        table.add_row(
            row.tier, str(row.exit_layer), f"{row.loss:.4f}", f"{row.perplexity:.4g}", *with_top
        )
    return table
