"""Recorded runs: what a decode-shaped step enqueues, recorded once for a bucket, then replayed.

Replaying costs the host one call instead of one for each kernel, which at few rows is most of a
step. `MFS_TRT_CUDA_GRAPHS=0` switches it off.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mfs_trt.engine.packed_arrays import PackedArrays
from mfs_trt.errors import ConfigError

SWITCH = "MFS_TRT_CUDA_GRAPHS"
MAX_GRAPHS = 48  # of one plan: a graph of it holds an execution context


@dataclass(frozen=True)
class Recorded:
    """A run that reads and writes at fixed addresses."""

    replay: Callable[[], None]  # enqueue it again on the current stream
    output: Tensor  # what it writes
    kept: tuple[object, ...] = ()  # what has to live as long


# Runs once on tensors that stay where they are, and records it.
Record = Callable[[Mapping[str, Tensor]], Recorded]
RecordRun = Callable[[Callable[[], None]], Callable[[], None]]  # what `make_recorder` gives


class DecodeGraphs:
    """Recorded runs of one plan by bucket; the one not used for longest makes room."""

    def __init__(self, record: Record, device: torch.device, max_graphs: int = MAX_GRAPHS) -> None:
        self._record, self._device, self._max_graphs = record, device, max_graphs
        self._graphs: dict[Hashable, _Graph] = {}

    def run(
        self, bucket: Hashable, arrays: Mapping[str, np.ndarray], fixed: Mapping[str, Tensor]
    ) -> Tensor:
        """Replay the run of `bucket`, recorded at first use; its output is valid until the next.

        `arrays` int32 are sent to the addresses that were recorded. `fixed` tensors are read where
        they are: a run that was recorded for other shapes or addresses is recorded again.
        """
        graph = self._graphs.pop(bucket, None)
        if graph is None or not graph.takes(arrays, fixed):
            graph = _Graph(self._record, arrays, fixed, self._device)
        else:
            graph.inputs.fill(arrays)
        self._graphs[bucket] = graph  # the last one used is the last to go
        if len(self._graphs) > self._max_graphs:
            del self._graphs[next(iter(self._graphs))]
        graph.recorded.replay()
        return graph.recorded.output


class _Graph:
    def __init__(
        self,
        record: Record,
        arrays: Mapping[str, np.ndarray],
        fixed: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.inputs = PackedArrays(arrays, device)
        self._fixed = _places(fixed)
        self.recorded = record({**self.inputs.tensors, **fixed})

    def takes(self, arrays: Mapping[str, np.ndarray], fixed: Mapping[str, Tensor]) -> bool:
        return self.inputs.takes(arrays) and _places(fixed) == self._fixed


def _places(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, torch.Size]]:
    return {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}


def make_recorder() -> RecordRun:
    """A function that records in a CUDA graph what a run enqueues, and returns its replay.

    The run must have run once before: what is compiled, chosen or allocated at first use is there.
    All graphs of a recorder share memory: nothing that a run allocates may be read after it, and
    one replay at a time runs.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return record


def uses_graphs() -> bool:
    """What the operator set; on by default. Raises `ConfigError` for anything but 0 and 1."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"
