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


class BuildBars:
    """A bar of plans, and one of what TensorRT does for the present one once it tells."""

    def __init__(self, progress: Progress, num_plans: int) -> None:
        self._progress = progress
        self._num_plans = num_plans
        self._plans = progress.add_task("plans", total=num_plans)
        self._phase = progress.add_task("", total=1.0, visible=False)

    def on_plan(self, name: str) -> None:
        self._progress.update(self._plans, advance=1, description=name)

    def on_phase(self, phase: str, share: float) -> None:
        self._progress.update(self._phase, description=phase, completed=share, visible=True)

    def finish(self) -> None:
        self._progress.update(self._plans, completed=self._num_plans, description="plans")
        self._progress.update(self._phase, visible=False)


@contextmanager
def build_progress(family: FamilySpec, console: Console) -> Iterator[BuildBars]:
    """Show the bars of a build; yields the listeners of `build_engine`."""
    heads = {family.head_name(tier) for tier in range(len(family.tiers))}
    with _bar(console) as progress:
        bars = BuildBars(progress, len(family.segments) + len(heads))
        yield bars
        bars.finish()


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
