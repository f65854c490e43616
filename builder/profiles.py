"""Limits → optimisation profiles: the shapes that a plan takes, and those it is fastest at. Pure.

Two profiles a plan, in this order: decode (one row a request) and prefill (any step).
"""

from dataclasses import dataclass

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.tensorrt_inputs import MAX_LANE_WIDTH

Range = tuple[int, int, int]  # least, fastest, greatest
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# input name, without its layer group → what each of its dynamic dimensions counts, in order
_DIMENSIONS = {
    "input_ids": ("rows",),
    "below": ("rows_below",),
    "features": ("slots",),
    "source_rows": ("rows",),
    "positions": ("rows",),
    "rows": ("rows_at_exits",),
    "exit_rows": ("exits",),
    "tiers": ("exits",),
}
_DIMENSIONS_OF_ATTENTION = {
    "portable": {
        "lane_rows": ("lanes", "width"),
        "lane_positions": ("lanes", "width"),
        "lane_lengths": ("lanes",),
        "row_queries": ("rows",),
        "key_positions": ("keys",),
        "block_tables": ("lanes", "blocks"),
        "rows_by_frame": ("rows",),
    },
    "plugin": {
        "slot_mapping": ("rows",),
        "block_tables": ("reqs", "blocks"),
        "query_start_loc": ("starts",),
        "seq_lens": ("reqs",),
    },
    "gpt_attention": {
        "attention_rows": ("rows",),
        "row_queries": ("rows",),
        "sequence_length": ("reqs",),
        "host_past_key_value_lengths": ("reqs",),
        "context_lengths": ("reqs",),
        "host_context_lengths": ("reqs",),
        "cache_indirection": ("reqs",),
        "host_request_types": ("reqs",),
        "kv_cache_block_offsets": ("reqs", "blocks"),
        "host_kv_cache_block_offsets": ("reqs", "blocks"),
    },
}


@dataclass(frozen=True)
class Profile:
    """Ranges of what dynamic dimensions count; per input, what its dimensions count."""

    name: str
    ranges: dict[str, Range]
    dimensions: dict[str, tuple[str, ...]]

    def shapes(self, input_name: str, shape: tuple[int, ...]) -> Shapes:
        """Least, fastest and greatest shape of an input; -1 in `shape` is a dynamic dimension."""
        counts = iter(self.dimensions.get(input_name.split(".")[0], ()))
        columns = [self.ranges[next(counts)] if d == -1 else (d, d, d) for d in shape]
        least, fastest, greatest = zip(*columns, strict=True)
        return least, fastest, greatest


def make_profiles(
    limits: EngineLimits, block_size: int, num_tiers: int, num_slots: int, attention: str
) -> tuple[Profile, ...]:
    """The decode-shaped and the prefill-shaped profile of every plan.

    `num_slots`: rows of a feature pool at most; `attention`: how the plans attend.
    """
    num_tokens = limits.max_num_batched_tokens
    num_reqs = min(limits.max_num_seqs, num_tokens)
    width = min(MAX_LANE_WIDTH, num_tokens)
    max_blocks = -(-limits.max_model_len // block_size)
    blocks = _range(max_blocks, max_blocks // 2)
    shared: dict[str, Range] = {
        "blocks": blocks,
        "keys": (blocks[0] * block_size, blocks[1] * block_size, blocks[2] * block_size),
        "slots": _range(num_slots, num_slots),
        "reqs": _range(num_reqs, num_reqs // 2),
        "starts": (2, max(2, num_reqs // 2 + 1), num_reqs + 1),
    }
    decode: dict[str, Range] = {
        "rows": _range(num_reqs, num_reqs // 2),
        "rows_below": _range(num_tokens, num_reqs // 2),  # other requests' rows may end below
        "lanes": _range(num_reqs, num_reqs // 2),
        "width": (1, 1, 1),
        "rows_at_exits": _range(num_tokens * num_tiers, num_reqs // 2),
        "exits": _range(num_reqs, num_reqs // 2),
    }
    prefill = {
        "rows": _range(num_tokens, num_tokens),
        "rows_below": _range(num_tokens, num_tokens),
        "lanes": _range(min(num_tokens, num_reqs + num_tokens // width), num_tokens // width),
        "width": _range(width, width),
        "rows_at_exits": _range(num_tokens * num_tiers, num_tokens),
        "exits": _range(num_tokens * num_tiers, num_reqs),
    }
    dimensions = _DIMENSIONS | _DIMENSIONS_OF_ATTENTION[attention]
    return (
        Profile("decode", shared | decode, dimensions),
        Profile("prefill", shared | prefill, dimensions),
    )


def _range(greatest: int, fastest: int) -> Range:
    return 1, max(1, min(fastest, greatest)), greatest
