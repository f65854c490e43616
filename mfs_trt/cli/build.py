"""`mfs-trt build`: family folder → engine folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import TARGETS, BuildConfig, parse_nbytes
from mfs_trt.cli.progress import build_progress
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.family.spec import load_family

console = Console()


def build(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    out: Annotated[Path, typer.Option(help="The engine folder to write.")] = Path("engine"),
    target: Annotated[str, typer.Option(help=f"What runs it: {', '.join(TARGETS)}.")] = "openvino",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16; tensorrt: float16; reference: float64.")
    ] = "float32",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 32,
    memory: Annotated[str, typer.Option(help="Size of the KV arena, as 512MiB.")] = "1GiB",
    kv_dtype: Annotated[
        str, typer.Option(help="Of keys and values: the same as dtype by default; uint8.")
    ] = "",
    weights: Annotated[
        str, typer.Option(help="int8, int4; fp8 (tensorrt, tensorrt-rtx); in dtype by default.")
    ] = "",
    compute_capabilities: Annotated[
        str, typer.Option(help="GPUs that tensorrt-rtx builds for, as sm86,sm120.")
    ] = "",
    attention: Annotated[
        str, typer.Option(help="portable or plugin (tensorrt); plugin where it can by default.")
    ] = "",
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
        kv_dtype=kv_dtype,
        weight_format=weights,
        compute_capabilities=tuple(filter(None, compute_capabilities.split(","))),
        attention=attention,
    )
    with build_progress(load_family(family), console) as bars:
        path = build_engine(family, out, config, bars.on_plan, bars.on_phase)
    console.print(f"engine: {path}", highlight=False)
