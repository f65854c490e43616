"""TensorRT plugins, ahead of time: importing this file defines `tensorrt.plugin.op.mfs.*`.

For each plugin: `register` says what comes out, `autotune` which types it takes, `aot_impl` gives
the kernel as PTX with its launch as expressions of the shapes. A plan holds the PTX and needs no
Python at run time. Import it through `registry.register_plugins`, which says what is missing.

A kernel's parameters are the plugin's inputs, integers, outputs, in that order. The attribute
`compute_capability` (80, 86, …) is the GPU's that the plan is built for.
"""

import numpy.typing  # noqa: F401 - tensorrt.plugin uses it without importing it
import tensorrt as trt
import tensorrt.plugin as trtp

from mfs_trt.plugins.compile import compile_kernel
from mfs_trt.plugins.triton_kernels import kv_write, paged_attention, tier_exit, variant_delta
from mfs_trt.plugins.triton_kernels.specialization import Specialization

MAX_SHARED_NBYTES = 48 << 10  # more has to be asked for at launch, which TensorRT may not do
_FLOATS = "FP32|FP16|BF16"
_DTYPE_NAMES = {
    trt.DataType.FLOAT: "float32",
    trt.DataType.HALF: "float16",
    trt.DataType.BF16: "bfloat16",
}
Implementation = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]


def _implementation(
    spec: Specialization, compute_capability: int, grid: tuple, integers: tuple
) -> Implementation:
    """What `aot_impl` returns. Raises `ValueError` when the kernel needs too much shared memory."""
    kernel = compile_kernel(spec, compute_capability)
    if kernel.shared_nbytes > MAX_SHARED_NBYTES:
        raise ValueError(
            f"{kernel.name}: expected at most {MAX_SHARED_NBYTES} bytes of shared memory, "
            f"got {kernel.shared_nbytes}"
        )
    launch = trtp.KernelLaunchParams(*grid)
    launch.block_x = kernel.num_threads
    launch.shared_mem = kernel.shared_nbytes
    return kernel.name, kernel.ptx, launch, trtp.SymIntExprs.from_tuple(integers)


def _types(floats: str, kinds: str) -> list[trtp.AutoTuneCombination]:
    """`kinds`: one letter an input and output: `f`loat of one common type, `i`nt32, `w`ide fp32."""
    names = {"f": floats, "i": "INT32", "w": "FP32"}
    return [trtp.AutoTuneCombination(", ".join(names[kind] for kind in kinds), "LINEAR")]


# --- mfs::paged_attention, and the same split over keys: mfs::paged_attention_split, merge_splits


def _attention(
    num_splits: int, inputs: tuple, group: int, window: int, scale: float, tile_rows: int, cc: int
) -> Implementation:
    query, key_cache, _, block_tables, _, _ = inputs
    while True:
        spec = paged_attention.specialize(
            _DTYPE_NAMES[query.dtype],
            num_heads=query.shape[1],
            num_kv_heads=key_cache.shape[1],
            head_dim=key_cache.shape[3],
            block_size=key_cache.shape[2],
            scale=scale,
            window=window or None,
            num_groups=block_tables.shape[2],
            group=group,
            num_splits=num_splits,
            tile_rows=tile_rows,
        )
        is_least = tile_rows <= paged_attention.DECODE_TILE_ROWS
        if is_least or compile_kernel(spec, cc).shared_nbytes <= MAX_SHARED_NBYTES:
            break
        tile_rows //= 2
    num_rows, (num_reqs, max_blocks, _) = query.shape_expr[0], block_tables.shape_expr
    grid = paged_attention.attention_grid(spec, num_rows, num_reqs)
    return _implementation(
        spec, cc, grid, (num_rows, num_reqs, key_cache.shape_expr[0], max_blocks)
    )


@trtp.register("mfs::paged_attention")
def _(
    query: trtp.TensorDesc,  # [num_rows, heads, d]
    key_cache: trtp.TensorDesc,  # [frames, kv_heads, block_size, d]
    value_cache: trtp.TensorDesc,
    block_tables: trtp.TensorDesc,  # [num_reqs, max_blocks, m] int32
    query_start_loc: trtp.TensorDesc,  # [num_reqs + 1] int32
    seq_lens: trtp.TensorDesc,  # [num_reqs] int32
    group: int,  # layer group of the block table
    window: int,  # tokens a row sees, itself included; 0: all
    scale: float,
    tile_rows: int,
    compute_capability: int,
) -> trtp.TensorDesc:
    return query.like()


@trtp.autotune("mfs::paged_attention")
def _(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, outputs):
    return _types(_FLOATS, "fffiii" + "f")


@trtp.aot_impl("mfs::paged_attention")
def _(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    group,
    window,
    scale,
    tile_rows,
    compute_capability,
    outputs,
    tactic,
) -> Implementation:
    inputs = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    return _attention(1, inputs, group, window, scale, tile_rows, compute_capability)


@trtp.register("mfs::paged_attention_split")
def _(
    query: trtp.TensorDesc,
    key_cache: trtp.TensorDesc,
    value_cache: trtp.TensorDesc,
    block_tables: trtp.TensorDesc,
    query_start_loc: trtp.TensorDesc,
    seq_lens: trtp.TensorDesc,
    group: int,
    window: int,
    scale: float,
    tile_rows: int,
    num_splits: int,
    compute_capability: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    rows, heads, dim = query.shape_expr
    partial = trtp.from_shape_expr((num_splits, rows, heads, dim), trt.DataType.FLOAT)
    weights = trtp.from_shape_expr((num_splits, rows, heads), trt.DataType.FLOAT)
    return partial, weights


@trtp.autotune("mfs::paged_attention_split")
def _(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, outputs):
    return _types(_FLOATS, "fffiii" + "ww")


@trtp.aot_impl("mfs::paged_attention_split")
def _(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    group,
    window,
    scale,
    tile_rows,
    num_splits,
    compute_capability,
    outputs,
    tactic,
) -> Implementation:
    inputs = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    return _attention(num_splits, inputs, group, window, scale, tile_rows, compute_capability)


@trtp.register("mfs::merge_splits")
def _(
    partial: trtp.TensorDesc,  # [splits, num_rows, heads, d] fp32
    weights: trtp.TensorDesc,  # [splits, num_rows, heads] fp32
    dtype: str,  # of the output
    num_splits: int,
    compute_capability: int,
) -> trtp.TensorDesc:
    kinds = {name: kind for kind, name in _DTYPE_NAMES.items()}
    _, rows, heads, dim = partial.shape_expr
    return trtp.from_shape_expr((rows, heads, dim), kinds[dtype])


@trtp.autotune("mfs::merge_splits")
def _(partial, weights, dtype, outputs):
    names = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
    return _types(names[dtype], "ww" + "f")


@trtp.aot_impl("mfs::merge_splits")
def _(partial, weights, dtype, num_splits, compute_capability, outputs, tactic) -> Implementation:
    num_heads, head_dim = partial.shape[2], partial.shape[3]
    spec = paged_attention.specialize_merge(
        dtype, num_heads=num_heads, head_dim=head_dim, num_splits=num_splits
    )
    num_rows = partial.shape_expr[1]
    return _implementation(spec, compute_capability, (num_rows, num_heads), (num_rows,))


# --- mfs::kv_write


@trtp.register("mfs::kv_write")
def _(
    key: trtp.TensorDesc,  # [num_rows, kv_heads, d]
    value: trtp.TensorDesc,
    slots: trtp.TensorDesc,  # [num_rows, m] int32
    key_cache: trtp.TensorDesc,  # [frames, kv_heads, block_size, d]
    value_cache: trtp.TensorDesc,
    group: int,
    compute_capability: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """In place: needs the preview feature `ALIASED_PLUGIN_IO_10_03`, and the network's output bound
    to the input's address.
    """
    return key_cache.aliased(), value_cache.aliased()


@trtp.autotune("mfs::kv_write")
def _(key, value, slots, key_cache, value_cache, outputs):
    return _types(_FLOATS, "ffiff" + "ff")


@trtp.aot_impl("mfs::kv_write")
def _(
    key, value, slots, key_cache, value_cache, group, compute_capability, outputs, tactic
) -> Implementation:
    num_frames, num_kv_heads, block_size, head_dim = key_cache.shape
    spec = kv_write.specialize(
        _DTYPE_NAMES[key.dtype],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_groups=slots.shape[1],
        group=group,
    )
    num_slots = key_cache.shape_expr[0] * block_size
    return _implementation(spec, compute_capability, (key.shape_expr[0],), (num_slots,))


# --- mfs::tier_exit


@trtp.register("mfs::tier_exit")
def _(
    hidden: trtp.TensorDesc,  # [num_rows, hidden]
    exit_rows: trtp.TensorDesc,  # [num_exits] int32
    tiers: trtp.TensorDesc,  # [num_exits] int32
    gains: trtp.TensorDesc,  # [num_tiers, hidden]
    eps: float,
    compute_capability: int,
) -> trtp.TensorDesc:
    return trtp.from_shape_expr((exit_rows.shape_expr[0], hidden.shape_expr[1]), hidden.dtype)


@trtp.autotune("mfs::tier_exit")
def _(hidden, exit_rows, tiers, gains, outputs):
    return _types(_FLOATS, "fiif" + "f")


@trtp.aot_impl("mfs::tier_exit")
def _(hidden, exit_rows, tiers, gains, eps, compute_capability, outputs, tactic) -> Implementation:
    spec = tier_exit.specialize(_DTYPE_NAMES[hidden.dtype], hidden_size=hidden.shape[1], eps=eps)
    integers = (hidden.shape_expr[0], gains.shape_expr[0])
    return _implementation(spec, compute_capability, (exit_rows.shape_expr[0],), integers)


# --- mfs::variant_project, mfs::variant_delta


@trtp.register("mfs::variant_project")
def _(
    x: trtp.TensorDesc,  # [num_rows, in]
    a: trtp.TensorDesc,  # [num_variants, in, rank]
    variant_starts: trtp.TensorDesc,  # [num_runs + 1] int32
    run_variants: trtp.TensorDesc,  # [num_runs] int32
    in_size: int,
    compute_capability: int,
) -> trtp.TensorDesc:
    num_splits = variant_delta.choose_num_splits(in_size)
    shape = (num_splits, x.shape_expr[0], a.shape_expr[2])
    return trtp.from_shape_expr(shape, trt.DataType.FLOAT)


@trtp.autotune("mfs::variant_project")
def _(x, a, variant_starts, run_variants, outputs):
    return _types(_FLOATS, "ffii" + "w")


@trtp.aot_impl("mfs::variant_project")
def _(
    x, a, variant_starts, run_variants, in_size, compute_capability, outputs, tactic
) -> Implementation:
    spec = variant_delta.specialize_project(_DTYPE_NAMES[x.dtype], in_size=in_size, rank=a.shape[2])
    sizes = (x.shape_expr[0], run_variants.shape_expr[0])
    grid = variant_delta.project_grid(spec, *sizes)
    return _implementation(spec, compute_capability, grid, (*sizes, a.shape_expr[0]))


@trtp.register("mfs::variant_delta")
def _(
    y: trtp.TensorDesc,  # [num_rows, out]
    projected: trtp.TensorDesc,  # [splits, num_rows, rank] fp32
    b: trtp.TensorDesc,  # [num_variants, rank, out]
    variant_starts: trtp.TensorDesc,
    run_variants: trtp.TensorDesc,
    in_size: int,
    compute_capability: int,
) -> trtp.TensorDesc:
    return y.like()


@trtp.autotune("mfs::variant_delta")
def _(y, projected, b, variant_starts, run_variants, outputs):
    return _types(_FLOATS, "fwfii" + "f")


@trtp.aot_impl("mfs::variant_delta")
def _(
    y, projected, b, variant_starts, run_variants, in_size, compute_capability, outputs, tactic
) -> Implementation:
    spec = variant_delta.specialize_add(
        _DTYPE_NAMES[y.dtype],
        in_size=in_size,
        out_size=y.shape[1],
        rank=b.shape[1],
        is_in_place=False,
    )
    sizes = (y.shape_expr[0], run_variants.shape_expr[0])
    grid = variant_delta.add_grid(spec, *sizes)
    return _implementation(spec, compute_capability, grid, (*sizes, b.shape_expr[0]))
