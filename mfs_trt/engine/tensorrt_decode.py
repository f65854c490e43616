"""DecodeRuns: decode-shaped rows of a TensorRT engine, replayed from recorded runs of its plans.

Each answers with None what it does not take; the engine runs that as it comes.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from mfs_trt.engine.cuda_graphs import DecodeGraphs, RecordRun
from mfs_trt.engine.decode_buckets import DecodeBuckets, pad_array, pad_rows
from mfs_trt.engine.interface import SegmentInput
from mfs_trt.engine.tensorrt_plans import DECODE, Plan, Plans

# `(segment, rows, input_ids, number of block columns) -> what the plan reads`, all int32.
MakeArrays = Callable[[int, SegmentInput, np.ndarray, int], Mapping[str, np.ndarray]]


class DecodeRuns:
    """Recorded runs by plan. Rows from other plans are copied to one place, where runs read them.

    What a run returns is valid until the next run of the same plan.
    """

    def __init__(
        self,
        plans: Plans,
        buckets: DecodeBuckets,
        make_arrays: MakeArrays,
        rows: torch.Tensor,
        record_run: RecordRun,
    ) -> None:
        """`rows` [buckets.max_rows, hidden] on the device: the place, finite numbers at first."""
        self._buckets, self._make_arrays, self._rows = buckets, make_arrays, rows

        def graphs(plan: Plan) -> DecodeGraphs:
            record = partial(plan.record, profile=DECODE, record_run=record_run)
            return DecodeGraphs(record, rows.device)

        self._segments = [graphs(plan) for plan in plans.segments]
        self._heads = {name: graphs(plan) for name, plan in plans.heads.items()}

    def run_segment(
        self,
        segment: int,
        rows: SegmentInput,
        input_ids: np.ndarray,
        below: torch.Tensor | None,
        features: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Hidden states [num_rows, hidden] of decode-shaped rows.

        `features`: of the boundary below; `below` [n, hidden]: rows of the segment below, if any.
        """
        bucket = self._buckets.choose(rows) if self._segments else None
        if bucket is None or (below is not None and len(below) > len(self._rows)):
            return None
        if segment == 0:
            input_ids = pad_array(input_ids, bucket.num_rows, 0)
        arrays = self._make_arrays(segment, pad_rows(rows, bucket), input_ids, bucket.num_blocks)
        if any(name.startswith("host_") for name in arrays):
            self._segments = []  # a recorded run would read them as they were
            return None
        fixed = {}
        if features is not None:
            fixed = {"features": features, "below": self._rows}
        if below is not None:
            self._rows[: len(below)] = below
        return self._segments[segment].run(bucket, arrays, fixed)[: rows.num_rows]

    def run_head(
        self, name: str, rows: torch.Tensor, exit_rows: np.ndarray, tiers: np.ndarray
    ) -> torch.Tensor | None:
        """Logits [num_exits, vocab_size] of `exit_rows` of rows [n, hidden]."""
        size = self._buckets.rows_for(len(tiers))
        if size is None or len(rows) > len(self._rows):
            return None
        self._rows[: len(rows)] = rows
        arrays = {
            "exit_rows": pad_array(exit_rows, size, 0),
            "tiers": pad_array(tiers, size, 0),
        }
        return self._heads[name].run(size, arrays, {"rows": self._rows})[: len(tiers)]
