"""What plans with tensorrt-llm's `GPTAttention` read: `SegmentInput` → its arrays. Pure.

Arrays whose name begins with `host_` are read on the host. A *pool* of the plugin is one layer of
the segment: it lies in the two arena tensors of its index in the layer group, keys first, and in
the frames of its layer group. Rows that exist already (slot -1) are written again as they are.
"""

import numpy as np

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec, SegmentInput

CONTEXT, GENERATION = 0, 1  # of `host_request_types`
_NUM_PERF_KNOBS = 16


class GptAttentionInputs:
    """Of `builder.emitters.tensorrt_llm`."""

    num_scratch_frames = 0
    is_recordable = False  # lengths and offsets are read on the host when a run is enqueued

    def __init__(self, limits: EngineLimits, kv_spec: KVCacheSpec) -> None:
        self._max_model_len, self._kv_spec = limits.max_model_len, kv_spec

    def segment(self, rows: SegmentInput, num_blocks: int | None = None) -> dict[str, np.ndarray]:
        """Requests of one row behind their first token are generations, and come last.

        `attention_rows`, `row_queries` [num_rows]: rows in the plugin's order, and where each row
        is in it; the others are those of `gpt_attention`, in its names and shapes.
        """
        counts = np.diff(rows.query_start_loc).astype(np.int32)
        past = (rows.seq_lens - counts).astype(np.int32)
        is_generation = (counts == 1) & (past > 0)
        order = np.argsort(is_generation, kind="stable")
        firsts = rows.query_start_loc[:-1][order]
        begins = np.cumsum(counts[order]) - counts[order]
        ordered = np.arange(rows.num_rows) + np.repeat(firsts - begins, counts[order])
        queries = np.empty(rows.num_rows, np.int32)
        queries[ordered] = np.arange(rows.num_rows)
        lengths = np.where(is_generation, past, counts)[order]
        num_blocks = num_blocks or -(-int(rows.seq_lens.max()) // self._kv_spec.block_size)
        offsets = self._block_offsets(rows.block_tables[order, :num_blocks])
        num_layers = len(offsets)
        pools = np.stack([np.arange(num_layers), np.zeros(num_layers)], axis=1)
        return {
            "attention_rows": ordered.astype(np.int32),
            "row_queries": queries,
            "sequence_length": rows.seq_lens[order].astype(np.int32),
            "host_past_key_value_lengths": past[order],
            "host_max_attention_window_sizes": np.full(num_layers, self._max_model_len, np.int32),
            "host_sink_token_length": np.zeros(1, np.int32),
            "context_lengths": lengths,
            "cache_indirection": np.zeros((len(order), 1, self._max_model_len), np.int32),
            "host_request_types": is_generation[order].astype(np.int32),
            "kv_cache_block_offsets": offsets,
            "host_kv_cache_block_offsets": offsets,
            "host_kv_cache_pool_mapping": pools.astype(np.int32),  # pool, layer in the pool
            "host_context_lengths": lengths,
            "host_runtime_perf_knobs": np.full(_NUM_PERF_KNOBS, -1, np.int64),
            "host_context_progress": np.zeros(1, np.int64),
        }

    def _block_offsets(self, tables: np.ndarray) -> np.ndarray:
        """tables [num_reqs, blocks, m] → [layers, num_reqs, 2, blocks], in frames of a pool."""
        keys = tables.transpose(2, 0, 1)
        pairs = np.stack([keys, keys + self._kv_spec.num_frames], axis=2)
        return np.repeat(pairs, self._kv_spec.group_size, axis=0).astype(np.int32)
