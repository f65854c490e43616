"""ReferenceEngine: the nested model in plain torch over the frame arena; the oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mfs_trt.engine.interface import SegmentInput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.threads import choose_num_threads
from mfs_trt.engine.torch_engine import TorchEngine
from mfs_trt.errors import EngineError
from mfs_trt.model.blocks import Attend
from mfs_trt.model.transformer import NestedModel
from mfs_trt.plugins import reference as ops
from mfs_trt.weights.store import WeightStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ReferenceEngine(TorchEngine):
    """Every operator is its reference, on the CPU."""

    @classmethod
    def load(cls, manifest: EngineManifest) -> "ReferenceEngine":
        """Build the model from the family that `manifest` names; checks its revision."""
        torch.set_num_threads(choose_num_threads())
        family = manifest.load_family()
        dtype = DTYPES.get(manifest.dtype)
        if dtype is None:
            raise EngineError(f"dtype: expected {', '.join(DTYPES)}, got {manifest.dtype!r}")
        store = WeightStore(manifest.family)
        kv_spec = manifest.kv_spec(family, manifest.layer_nbytes(family, dtype.itemsize))
        model = NestedModel.from_store(store, manifest.limits.max_model_len, dtype)
        return cls(model, manifest.limits, kv_spec)

    def _attend(self, segment: int, rows: SegmentInput) -> Attend:
        spec = self.family.segments[segment]
        config = self.family.model
        slots = torch.from_numpy(rows.slot_mapping).long()
        tables = torch.from_numpy(rows.block_tables).long()
        starts: Sequence[int] = rows.query_start_loc.tolist()
        seq_lens: Sequence[int] = rows.seq_lens.tolist()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            group, i = divmod(layer - spec.first_layer, self.kv_spec.group_size)
            ops.kv_write(self.key_cache[i], key, slots[:, group])
            ops.kv_write(self.value_cache[i], value, slots[:, group])
            return ops.paged_attention(
                query,
                self.key_cache[i],
                self.value_cache[i],
                tables[:, :, group],
                starts,
                seq_lens,
                config.head_dim**-0.5,
                config.layer_window(layer),
            )

        return attend
