"""`mfs-trt precipitate`: train a family's tiers (Knowledge Precipitation)."""

from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mfs_trt.cli.inspect import family_table
from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import TierSpec, load_family
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.precipitation.run import precipitate as run_training
from mfs_trt.precipitation.token_files import read_packed
from mfs_trt.precipitation.trainer import StepReport
from mfs_trt.precipitation.world import World, open_world
from mfs_trt.tokenizer import Tokenizer

console = Console()
DEFAULTS = PrecipitationConfig()


def precipitate(
    family: Annotated[Path, typer.Argument(help="The family folder to start from.")],
    data: Annotated[
        Path,
        typer.Option(help="A .txt, .jsonl or .parquet file, a folder of them, a saved dataset."),
    ],
    out: Annotated[Path, typer.Option(help="The family folder to write.")],
    tiers: Annotated[
        str | None,
        typer.Option(help="Exits to train, as for convert; the family's own by default."),
    ] = None,
    own_heads: Annotated[
        bool, typer.Option("--own-heads", help="Give lower tiers an LM head of their own.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights: pretraining.")
    ] = False,
    schedule: Annotated[
        str, typer.Option(help="stepwise: tiers join from high to low; joint: all at once.")
    ] = DEFAULTS.schedule,
    steps: Annotated[int, typer.Option(help="Optimizer steps, all stages together.")] = (
        DEFAULTS.num_steps
    ),
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = DEFAULTS.batch_size,
    micro_batch_size: Annotated[
        int, typer.Option(help="Sequences a forward pass and process: what fits.")
    ] = DEFAULTS.micro_batch_size,
    seq_length: Annotated[int, typer.Option(help="Tokens a sequence.")] = DEFAULTS.seq_length,
    learning_rate: Annotated[float, typer.Option()] = DEFAULTS.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Of each stage.")] = DEFAULTS.warmup_steps,
    weight_decay: Annotated[float, typer.Option()] = DEFAULTS.weight_decay,
    max_grad_norm: Annotated[float, typer.Option()] = DEFAULTS.max_grad_norm,
    tier_weight: Annotated[float, typer.Option(help="λ of the lower tiers.")] = (
        DEFAULTS.tier_weight
    ),
    balance: Annotated[
        str, typer.Option(help="λ: fixed, ramp (grows over its stage), gradient_norm (evened out).")
    ] = DEFAULTS.balance,
    distill: Annotated[
        float, typer.Option(help="Share of a lower tier's loss that is KL to the top tier.")
    ] = DEFAULTS.distill_weight,
    distill_temperature: Annotated[float, typer.Option()] = DEFAULTS.distill_temperature,
    distill_top_n: Annotated[
        int, typer.Option(help="Of the top tier's tokens; 0: all.")
    ] = DEFAULTS.distill_top_n,
    anchor: Annotated[
        float, typer.Option(help="Weight of the top tier's KL to the model it was.")
    ] = DEFAULTS.anchor_weight,
    trains: Annotated[
        str, typer.Option(help="all; lora: adapters only; exits: gains and own heads only.")
    ] = DEFAULTS.trains,
    lora_rank: Annotated[int, typer.Option()] = DEFAULTS.lora_rank,
    share_exit_norm: Annotated[
        bool, typer.Option("--share-exit-norm", help="One norm gain for all exits.")
    ] = False,
    autocast: Annotated[str, typer.Option(help="bfloat16 or float32.")] = DEFAULTS.autocast,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Activation checkpointing: less memory, more time.")
    ] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: FSDP2 in place of DDP.")
    ] = False,
    eval_sequences: Annotated[
        int, typer.Option(help="Sequences at the end of the data kept for evaluation.")
    ] = 0,
    text_key: Annotated[str, typer.Option(help="Key of the text in JSONL and parquet.")] = "text",
    checkpoint_every: Annotated[int, typer.Option()] = DEFAULTS.checkpoint_every,
    evaluate_every: Annotated[int, typer.Option()] = DEFAULTS.evaluate_every,
    seed: Annotated[int, typer.Option()] = DEFAULTS.seed,
    work: Annotated[
        Path | None,
        typer.Option(help="Checkpoints and metrics.jsonl; OUT.training by default. Goes on there."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the family in OUT.")] = False,
) -> None:
    """Train the tiers of FAMILY into one set of weights; goes on where it was interrupted.

    On several GPUs: torchrun --nproc-per-node N -m mfs_trt precipitate …
    """
    config = PrecipitationConfig(
        seq_length=seq_length,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        num_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        tier_weight=tier_weight,
        balance=balance,
        distill_weight=distill,
        distill_temperature=distill_temperature,
        distill_top_n=distill_top_n,
        anchor_weight=anchor,
        trains=trains,
        lora_rank=lora_rank,
        shares_exit_norm=share_exit_norm,
        autocast=autocast,
        recompute_layers=recompute,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        seed=seed,
    )
    source = load_family(family)
    specs = source.tiers
    if tiers is not None:
        depth = int(tiers.rpartition("=")[2]) if tiers.rpartition("=")[2].isdecimal() else 0
        specs = parse_tiers(tiers, depth or source.model.num_layers, own_heads)
    elif own_heads:
        top = source.model.num_layers
        specs = tuple(TierSpec(t.name, t.exit_layer, t.exit_layer < top) for t in specs)
    if not (family / "tokenizer.json").is_file():
        raise ConfigError(f"{family}: expected a family with a tokenizer to read the data with")
    work = work or out.with_name(out.name + ".training")
    tokens = read_packed(data, Tokenizer(family), seq_length, seed, text_key=text_key, cache=work)
    held_out = None
    if eval_sequences:
        tokens, held_out = tokens.split(eval_sequences)
    with open_world(shard) as world, _progress(world, tokens, config) as on_step:
        spec = run_training(
            family,
            out,
            tokens,
            config,
            world,
            tiers=specs,
            work=work,
            is_random=from_scratch,
            held_out=held_out,
            force=force,
            on_step=on_step,
        )
    if spec is not None:
        console.print(family_table(spec))
        console.print(f"family: {out}  revision {spec.revision[:12]}")


@contextmanager
def _progress(world: World, tokens: PackedTokens, config: PrecipitationConfig) -> Any:
    """A bar with the loss of each tier; on a pipe, a line each evaluation."""
    if not world.is_main:
        yield lambda report: None
        return
    epochs = config.num_steps * config.batch_size / tokens.num_sequences
    console.print(f"{tokens.num_tokens:,} tokens, {epochs:.2f} epochs in {config.num_steps} steps")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loss", total=config.num_steps)

        def on_step(report: StepReport) -> None:
            bar.update(task, completed=report.step, description=_line(report))
            if report.held_out:
                losses = "  ".join(f"{k} {v:.4f}" for k, v in report.held_out.items())
                console.print(f"step {report.step}: held-out {losses}")

        yield on_step


def _line(report: StepReport) -> str:
    losses = " ".join(f"{k} {v:.3f}" for k, v in report.losses.items() if v == v)
    return f"{losses}  {report.tokens_per_s:,.0f} tok/s"
