"""`mfs-trt export`: one tier of a family → an ordinary model that other engines load."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mfs_trt.checkpoint.gguf_writer import write_gguf_checkpoint
from mfs_trt.checkpoint.hf_writer import write_hf_checkpoint
from mfs_trt.checkpoint.trtllm import write_trtllm_checkpoint
from mfs_trt.errors import ConfigError
from mfs_trt.weights.store import WeightStore
from mfs_trt.weights.tier import TierCheckpoint

FORMATS = ("hf", "gguf", "trtllm")

console = Console()


def export(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    out: Annotated[
        Path, typer.Option(help="The folder to write; for gguf the file, as small.gguf.")
    ],
    tier: Annotated[str | None, typer.Option(help="The deepest by default.")] = None,
    format: Annotated[str, typer.Option(help="hf, gguf or trtllm.")] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16; the family's own by default."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks (trtllm).")] = 1,
    with_tokenizer: Annotated[
        bool,
        typer.Option("--tokenizer/--no-tokenizer", help="Put the tokenizer into the file (gguf)."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint in OUT.")] = False,
) -> None:
    """Write a tier of FAMILY as a model of its own, which holds the layers below its exit."""
    if format not in FORMATS:
        raise ConfigError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    store = WeightStore(family)
    reader = TierCheckpoint(store, tier or store.spec.tiers[-1].name, dtype)
    with console.status(f"writing {out}"):
        if format == "hf":
            write_hf_checkpoint(reader, out, force=force)
        elif format == "trtllm":
            write_trtllm_checkpoint(reader, out, tp, force=force)
        else:
            write_gguf_checkpoint(reader, out, with_tokenizer=with_tokenizer, force=force)
    console.print(f"{format}: {out}  {reader.config.num_layers} layers, {reader.dtype}")
