"""`mfs-trt inspect`: what each tier of a family costs, as a table."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mfs_trt.dtypes import item_size
from mfs_trt.family.costs import format_nbytes, sharing_summary, tier_costs
from mfs_trt.family.spec import FamilySpec
from mfs_trt.weights.store import WeightStore

console = Console()


def inspect(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all weights and check them against the revision.")
    ] = False,
) -> None:
    """Print layers, parameters, weight bytes and KV bytes per token of every tier of FAMILY."""
    store = WeightStore(family)
    spec = store.spec
    model = spec.model
    console.print(
        f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads} heads ({model.num_kv_heads} KV), vocabulary {model.vocab_size}, "
        f"{spec.dtype}; from {spec.source or 'unknown'}; revision {spec.revision[:12]}"
    )
    console.print(family_table(spec))
    console.print(sharing_summary(spec, spec.dtype))
    if verify:
        store.verify()
        console.print("weights match the revision")


def family_table(family: FamilySpec) -> Table:
    """One row a tier: what it adds, and in brackets what a server up to it holds."""
    table = Table("tier", title="added by the tier (cumulative)")
    for column in ("layers", "parameters", "weights", "KV per token", "frames per block"):
        table.add_column(column, justify="right")
    frames = 0
    for i, tier in enumerate(tier_costs(family, item_size(family.dtype))):
        frames += family.groups_per_segment[i]
        table.add_row(
            tier.name,
            f"{tier.num_layers} ({tier.exit_layer})",
            f"{tier.num_parameters / 1e6:,.1f} M ({tier.total_parameters / 1e6:,.1f} M)",
            f"{format_nbytes(tier.weight_nbytes)} ({format_nbytes(tier.total_weight_nbytes)})",
            f"{format_nbytes(tier.kv_nbytes_per_token)} "
            f"({format_nbytes(tier.total_kv_nbytes_per_token)})",
            f"{family.groups_per_segment[i]} ({frames})",
        )
    return table
