"""`mfs-trt convert`: a checkpoint of any known format → family folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.checkpoint.hf import copy_tokenizer, end_tokens_of_folder
from mfs_trt.cli.inspect import family_table
from mfs_trt.cli.progress import conversion_progress
from mfs_trt.errors import CheckpointError
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.weights.convert import convert_checkpoint

console = Console()


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder, a GGUF file or a TensorRT-LLM checkpoint folder."
        ),
    ],
    tiers: Annotated[
        str,
        typer.Option(
            help="A count (3), exit layers (10,20,30), fractions (0.33,0.66,1.0), "
            "or names (small=10,large=30)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The family folder to write.")] = Path("family"),
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16; the source's own by default."),
    ] = None,
    own_heads: Annotated[
        bool, typer.Option("--own-heads", help="Give lower tiers an LM head of their own.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder to take the tokenizer from, where SOURCE has none."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the family in OUT.")] = False,
) -> None:
    """Fold the checkpoint SOURCE into a family of tiers."""
    reader = open_checkpoint(source)
    specs = parse_tiers(tiers, reader.config.num_layers, own_heads)
    write_tokenizer, end_token_ids = reader.write_tokenizer, reader.end_token_ids
    if tokenizer is not None:
        end_token_ids = end_tokens_of_folder(tokenizer) or end_token_ids

        def write_tokenizer(folder: Path) -> bool:
            if not copy_tokenizer(tokenizer, folder):
                raise CheckpointError(f"{tokenizer}: expected tokenizer files, found none")
            return True

    with conversion_progress(reader, console) as on_tensor:
        family = convert_checkpoint(
            reader,
            specs,
            out,
            dtype=dtype,
            write_tokenizer=write_tokenizer,
            end_token_ids=end_token_ids,
            force=force,
            on_tensor=on_tensor,
        )
    console.print(family_table(family))
    console.print(f"family: {out}  revision {family.revision[:12]}")
    if not (out / "tokenizer.json").is_file():
        console.print("[yellow]no tokenizer in the source: give one with --tokenizer[/yellow]")
