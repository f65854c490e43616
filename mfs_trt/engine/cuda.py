"""CudaEngine: the nested model in torch on an NVIDIA GPU, on the kernels of `plugins`.

No plan is built: an engine folder of this target is its manifest. Everything above the plans runs
on any GPU that torch can use.
"""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from mfs_trt.engine.cuda_graphs import (
    DecodeGraphs,
    Recorded,
    RecordRun,
    make_recorder,
    uses_graphs,
)
from mfs_trt.engine.decode_buckets import DecodeBuckets, pad_rows
from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.packed_arrays import upload
from mfs_trt.engine.torch_engine import TorchEngine
from mfs_trt.errors import EngineError
from mfs_trt.model.blocks import Attend, Exit
from mfs_trt.model.transformer import NestedModel
from mfs_trt.weights.store import WeightStore

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaEngine(TorchEngine):
    """Attention, cache writes and exits are kernels; products of matrices are torch's.

    A segment's decode-shaped rows are replayed from a CUDA graph of the bucket they are padded to.
    """

    def __init__(
        self,
        model: NestedModel,
        limits: EngineLimits,
        kv_spec: KVCacheSpec,
        record_run: RecordRun | None = None,
    ) -> None:
        """`record_run` records a run for replay; without one every step is run as it comes."""
        super().__init__(model, limits, kv_spec)
        exits = [model.exits[str(tier.exit_layer)] for tier in self.family.tiers]
        self._exits: list[Exit] = exits
        self._gains = torch.stack([e.norm.weight.detach() for e in exits])
        self._num_processors = 1  # for kernels that are interpreted on the CPU
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._num_processors = properties.multi_processor_count
        self._buckets = DecodeBuckets(limits, kv_spec.block_size)
        size = (self._buckets.max_rows, self.family.model.hidden_size)
        self._decode_rows = self._gains.new_zeros(size)  # what recorded segments read
        self._graphs: list[DecodeGraphs] = []  # by segment
        if record_run is not None:
            self._graphs = [
                DecodeGraphs(partial(self._record, record_run, s), self.device)
                for s in range(len(self.family.segments))
            ]

    @classmethod
    def load(cls, manifest: EngineManifest) -> "CudaEngine":
        """Build the model on the first GPU; raises `EngineError` naming what is missing."""
        check_machine()
        family = manifest.load_family()
        dtype = DTYPES.get(manifest.dtype)
        if dtype is None:
            raise EngineError(f"dtype: expected {', '.join(DTYPES)}, got {manifest.dtype!r}")
        store = WeightStore(manifest.family)
        kv_spec = manifest.kv_spec(family, manifest.layer_nbytes(family, dtype.itemsize))
        model = NestedModel.from_store(store, manifest.limits.max_model_len, dtype)
        model = model.to("cuda")
        record_run = make_recorder() if uses_graphs() else None
        return cls(model, manifest.limits, kv_spec, record_run)

    def close(self) -> None:
        super().close()
        self._graphs = []

    def _run_segment(self, segment: int, rows: SegmentInput, x: Tensor) -> Tensor:
        bucket = self._buckets.choose(rows) if self._graphs else None
        if bucket is None:
            return super()._run_segment(segment, rows, x)
        self._decode_rows[: rows.num_rows] = x
        padded = pad_rows(rows, bucket)
        arrays = {**_attention_arrays(padded), "positions": padded.positions}
        fixed = {"x": self._decode_rows[: bucket.num_rows]}
        return self._graphs[segment].run(bucket, arrays, fixed)[: rows.num_rows]

    def _record(
        self, record_run: RecordRun, segment: int, tensors: Mapping[str, Tensor]
    ) -> Recorded:
        """A segment's run of decode-shaped rows, on tensors that stay where they are."""
        longest = tensors["block_tables"].shape[1] * self.kv_spec.block_size
        output = torch.empty_like(tensors["x"])

        def run() -> None:
            attend = self._attention(segment, tensors, longest)
            positions = tensors["positions"].long()
            output.copy_(self.model.run_segment(segment, tensors["x"], positions, attend))

        run()
        return Recorded(record_run(run), output)

    def _attend(self, segment: int, rows: SegmentInput) -> Attend:
        tensors = upload(_attention_arrays(rows), self.device)
        return self._attention(segment, tensors, int(rows.seq_lens.max()))

    def _attention(self, segment: int, tensors: Mapping[str, Tensor], longest: int) -> Attend:
        """Over `_attention_arrays` on the device; `longest`: tokens of a request at most."""
        from mfs_trt.plugins.triton_kernels.kv_write import kv_write
        from mfs_trt.plugins.triton_kernels.paged_attention import (
            choose_num_splits,
            choose_tile_rows,
            paged_attention,
        )

        spec, config = self.family.segments[segment], self.family.model
        slots, seq_lens = tensors["slot_mapping"], tensors["seq_lens"]
        tables, starts = tensors["block_tables"], tensors["query_start_loc"]
        tile_rows = choose_tile_rows(len(slots), len(seq_lens))
        num_programs = len(seq_lens) * config.num_kv_heads
        num_splits = choose_num_splits(num_programs, longest, self._num_processors)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            group, i = divmod(layer - spec.first_layer, self.kv_spec.group_size)
            caches = (self.key_cache[i], self.value_cache[i])
            kv_write(key, value.contiguous(), slots, *caches, group=group)
            return paged_attention(
                query,
                *caches,
                tables,
                starts,
                seq_lens,
                config.head_dim**-0.5,
                config.layer_window(layer),
                group=group,
                num_splits=num_splits,
                tile_rows=tile_rows,
            )

        return attend

    def _exit_logits(self, segment: int, exit_rows: np.ndarray, x: Tensor) -> Tensor:
        from mfs_trt.plugins.triton_kernels.tier_exit import tier_exit

        wanted = torch.from_numpy(np.ascontiguousarray(exit_rows)).to(self.device)
        tiers = torch.full_like(wanted, segment)
        eps = self.family.model.rms_norm_eps
        return self._exits[segment].lm_head(tier_exit(x, wanted, tiers, self._gains, eps))


def _attention_arrays(rows: SegmentInput) -> dict[str, np.ndarray]:
    """What the kernels read of a segment's rows, all int32."""
    names = ("slot_mapping", "block_tables", "query_start_loc", "seq_lens")
    return {name: getattr(rows, name) for name in names}


def check_machine() -> None:
    """Raises `EngineError`, in one line, when this machine cannot run the target `cuda`."""
    if not torch.cuda.is_available():
        raise EngineError(
            f"target cuda: expected an NVIDIA GPU that torch can use; torch {torch.__version__} "
            "sees none"
        )
    if find_spec("triton") is None:
        raise EngineError("target cuda: its kernels need OpenAI Triton: pip install 'mfs-trt[gpu]'")
