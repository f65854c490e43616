"""CudaEngine: the nested model in torch on an NVIDIA GPU, on the kernels of `plugins`.

No plan is built: an engine folder of this target is its manifest. Everything above the plans runs
on any GPU that torch can use.
"""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.torch_engine import TorchEngine
from mfs_trt.errors import EngineError
from mfs_trt.model.blocks import Attend, Exit
from mfs_trt.model.transformer import NestedModel
from mfs_trt.weights.store import WeightStore

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaEngine(TorchEngine):
    """Attention, cache writes and exits are kernels; products of matrices are torch's."""

    def __init__(self, model: NestedModel, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        super().__init__(model, limits, kv_spec)
        exits = [model.exits[str(tier.exit_layer)] for tier in self.family.tiers]
        self._exits: list[Exit] = exits
        self._gains = torch.stack([e.norm.weight.detach() for e in exits])
        self._num_processors = 1  # for kernels that are interpreted on the CPU
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._num_processors = properties.multi_processor_count

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
        return cls(model.to("cuda"), manifest.limits, kv_spec)

    def _attend(self, segment: int, rows: SegmentInput) -> Attend:
        from mfs_trt.plugins.triton_kernels.kv_write import kv_write
        from mfs_trt.plugins.triton_kernels.paged_attention import (
            choose_num_splits,
            choose_tile_rows,
            paged_attention,
        )

        spec = self.family.segments[segment]
        config = self.family.model
        slots, tables, starts, seq_lens = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (
                rows.slot_mapping,
                rows.block_tables,
                rows.query_start_loc,
                rows.seq_lens,
            )
        )
        tile_rows = choose_tile_rows(rows.num_rows, rows.num_reqs)
        num_programs = rows.num_reqs * config.num_kv_heads
        longest = int(rows.seq_lens.max())
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


def check_machine() -> None:
    """Raises `EngineError`, in one line, when this machine cannot run the target `cuda`."""
    if not torch.cuda.is_available():
        raise EngineError(
            f"target cuda: expected an NVIDIA GPU that torch can use; torch {torch.__version__} "
            "sees none"
        )
    if find_spec("triton") is None:
        raise EngineError("target cuda: its kernels need OpenAI Triton: pip install 'mfs-trt[gpu]'")
