"""Progress bars of the commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mfs_trt.checkpoint import CheckpointReader
from mfs_trt.tensor_names import tensor_shapes
from mfs_trt.weights.writer import TensorEntry


@contextmanager
def conversion_progress(
    reader: CheckpointReader, console: Console
) -> Iterator[Callable[[TensorEntry], None]]:
    """Show a bar during a conversion; yields the `on_tensor` of `convert_checkpoint`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    total = sum(prod(shape) for shape in tensor_shapes(reader.config).values())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("weights", total=total)

        def on_tensor(entry: TensorEntry) -> None:
            progress.update(task, advance=prod(entry.shape))

        yield on_tensor
        progress.update(task, completed=total)
