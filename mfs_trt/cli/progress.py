"""Progress bars of the commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mfs_trt.checkpoint import CheckpointReader
from mfs_trt.family.spec import FamilySpec
from mfs_trt.tensor_names import tensor_shapes
from mfs_trt.weights.writer import TensorEntry


@contextmanager
def conversion_progress(
    reader: CheckpointReader, console: Console
) -> Iterator[Callable[[TensorEntry], None]]:
    """Show a bar during a conversion; yields the `on_tensor` of `convert_checkpoint`."""
    total = sum(prod(shape) for shape in tensor_shapes(reader.config).values())
    with _bar(console) as progress:
        task = progress.add_task("weights", total=total)

        def on_tensor(entry: TensorEntry) -> None:
            progress.update(task, advance=prod(entry.shape))

        yield on_tensor
        progress.update(task, completed=total)


@contextmanager
def build_progress(family: FamilySpec, console: Console) -> Iterator[Callable[[str], None]]:
    """Show a bar during a build; yields the `on_plan` of `build_engine`."""
    heads = {family.head_name(tier) for tier in range(len(family.tiers))}
    total = len(family.segments) + len(heads)
    with _bar(console) as progress:
        task = progress.add_task("plans", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)
        progress.update(task, completed=total, description="plans")


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
