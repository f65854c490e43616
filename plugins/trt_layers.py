"""The operators as layers of a TensorRT network, one function each: fast paths of full TensorRT.

Call `registry.register_plugins()` first. Tensors are the network's `ITensor`s; sizes of heads,
caches and weights must be known when the network is made, numbers of rows need not.
`compute_capability` (80, 86, …) is that of the GPU the plan is built for.
"""

from typing import Any

from mfs_trt.plugins.registry import register_plugins


def add_kv_write(
    network: Any,
    key: Any,
    value: Any,
    slots: Any,
    key_cache: Any,
    value_cache: Any,
    *,
    group: int,
    compute_capability: int,
) -> tuple[Any, Any]:
    """The caches after the write, which later layers must read; see `qdp` on aliasing."""
    layer = network.add_plugin(
        _operators().kv_write(
            key,
            value,
            slots,
            key_cache,
            value_cache,
            group=group,
            compute_capability=compute_capability,
        )
    )
    return layer.get_output(0), layer.get_output(1)


def add_paged_attention(
    network: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    dtype: str,
    group: int,
    scale: float,
    window: int | None,
    tile_rows: int,
    num_splits: int,
    compute_capability: int,
) -> Any:
    """[num_rows, heads, d]; one plugin, or two where the keys are split.

    A plan has one `tile_rows` and one `num_splits`: those of the profile it mostly runs
    (`paged_attention.choose_tile_rows`, `choose_num_splits`).
    """
    inputs = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    settings = {
        "group": group,
        "window": window or 0,
        "scale": scale,
        "tile_rows": tile_rows,
    }
    target = {"compute_capability": compute_capability}
    op = _operators()
    if num_splits == 1:
        return network.add_plugin(op.paged_attention(*inputs, **settings, **target)).get_output(0)
    split = network.add_plugin(
        op.paged_attention_split(*inputs, **settings, num_splits=num_splits, **target)
    )
    parts = (split.get_output(0), split.get_output(1))
    merged = op.merge_splits(*parts, dtype=dtype, num_splits=num_splits, **target)
    return network.add_plugin(merged).get_output(0)


def add_tier_exit(
    network: Any,
    hidden: Any,
    exit_rows: Any,
    tiers: Any,
    gains: Any,
    *,
    eps: float,
    compute_capability: int,
) -> Any:
    """[num_exits, hidden], normalised."""
    op = _operators().tier_exit
    plugin = op(hidden, exit_rows, tiers, gains, eps=eps, compute_capability=compute_capability)
    return network.add_plugin(plugin).get_output(0)


def add_variant_delta(
    network: Any,
    y: Any,
    x: Any,
    a: Any,
    b: Any,
    variant_starts: Any,
    run_variants: Any,
    *,
    in_size: int,
    compute_capability: int,
) -> Any:
    """[num_rows, out]: y plus each variant run's delta."""
    runs = (variant_starts, run_variants)
    settings = {"in_size": in_size, "compute_capability": compute_capability}
    op = _operators()
    projected = network.add_plugin(op.variant_project(x, a, *runs, **settings)).get_output(0)
    return network.add_plugin(op.variant_delta(y, projected, b, *runs, **settings)).get_output(0)


def _operators() -> Any:
    register_plugins()
    import tensorrt.plugin

    return tensorrt.plugin.op.mfs
