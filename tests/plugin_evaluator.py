"""Plugins evaluated with torch: what `plugins.reference` says that their operators do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mfs_trt.plugins import reference


def evaluate_plugin(
    name: str, arguments: Sequence[Tensor], attributes: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The plugin's outputs; those that lie on an input are that input, written."""
    return _PLUGINS[name](*arguments, **attributes)


def _kv_write(key, value, slots, key_cache, value_cache, *, group, compute_capability):
    num_frames, _, block_size, _ = key_cache.shape
    chosen = slots[:, group].long()
    assert (chosen < num_frames * block_size).all(), "a slot beyond the arena"
    for cache, rows in ((key_cache, key), (value_cache, value)):
        reference.kv_write(cache, rows, chosen)
    return key_cache, value_cache


def _attended(query, key_cache, value_cache, tables, starts, lengths, group, window, scale):
    assert starts[0] == 0 and starts[-1] == len(query)
    assert len(starts) - 1 == len(lengths) == len(tables)
    assert (lengths <= tables.shape[1] * key_cache.shape[2]).all(), "a table too short"
    return reference.paged_attention(
        query,
        key_cache,
        value_cache,
        tables[:, :, group].long(),
        starts.tolist(),
        lengths.tolist(),
        scale,
        window or None,
    )


def _paged_attention(*inputs, group, window, scale, tile_rows, compute_capability):
    return (_attended(*inputs, group, window, scale),)


def _paged_attention_split(
    *inputs, group, window, scale, tile_rows, num_splits, compute_capability
):
    """All keys are in the last split: the others' weights, as logarithms, say so."""
    whole = _attended(*inputs, group, window, scale).float()
    partial = torch.zeros(num_splits, *whole.shape)
    partial[-1] = whole
    weights = torch.full((num_splits, *whole.shape[:2]), float("-inf"))
    weights[-1] = 0
    return partial, weights


def _merge_splits(partial, weights, *, dtype, num_splits, compute_capability):
    assert len(partial) == len(weights) == num_splits
    shares = weights.sub(weights.amax(0)).exp2()
    merged = (partial * shares[..., None]).sum(0) / shares.sum(0)[..., None]
    return (merged.to(getattr(torch, dtype)),)


def _tier_exit(hidden, exit_rows, tiers, gains, *, eps, compute_capability):
    return (reference.tier_exit(hidden, exit_rows.long(), tiers.long(), gains, eps),)


_PLUGINS = {
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "paged_attention_split": _paged_attention_split,
    "merge_splits": _merge_splits,
    "tier_exit": _tier_exit,
}
