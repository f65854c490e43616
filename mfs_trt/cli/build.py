"""`mfs-trt build`: family folder → engine folder."""

from pathlib import Path
from typing import Annotated

import typer

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig, parse_nbytes
from mfs_trt.engine.interface import EngineLimits


def build(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    out: Annotated[Path, typer.Option(help="The engine folder to write.")] = Path("engine"),
    target: Annotated[str, typer.Option(help="What runs it.")] = "reference",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 32,
    memory: Annotated[str, typer.Option(help="Size of the KV arena, as 512MiB.")] = "1GiB",
    max_num_seqs: Annotated[int, typer.Option(help="Requests in a step.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step.")] = 512,
    max_model_len: Annotated[int, typer.Option(help="Tokens of one request.")] = 2048,
) -> None:
    """Build an engine from FAMILY."""
    config = BuildConfig(
        target=target,
        dtype=dtype,
        block_size=block_size,
        memory_nbytes=parse_nbytes(memory),
        limits=EngineLimits(max_num_seqs, max_num_batched_tokens, max_model_len),
    )
    path = build_engine(family, out, config)
    print(f"engine: {path}")
