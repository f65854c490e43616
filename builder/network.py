"""The nested model, described once for all backends: a segment's plan and a head's plan."""

from mfs_trt.builder.blocks import decoder_layer
from mfs_trt.builder.emitter import Emitter, Tensor
from mfs_trt.family.spec import FamilySpec, SegmentSpec
from mfs_trt.model.rope import rope_tables
from mfs_trt.tensor_names import EMBEDDING


def describe_segment(
    emit: Emitter[Tensor], family: FamilySpec, segment: SegmentSpec, max_model_len: int
) -> None:
    """Layers of one segment over the arena.

    Inputs are `StepInput`'s arrays: `input_ids` for segment 0, else `below`, `features`,
    `source_rows`; `positions`; and what the backend's attention reads. Output: `hidden`
    [num_rows, hidden].
    """
    model = family.model
    if segment.index == 0:
        x = emit.embedding(EMBEDDING, emit.input("input_ids", "int32", (-1,)))
    else:
        below = emit.input("below", "activation", (-1, model.hidden_size))
        features = emit.input("features", "activation", (-1, model.hidden_size))
        x = emit.source_rows(below, features, emit.input("source_rows", "int32", (-1,)))
    positions = emit.input("positions", "int32", (-1,))
    cos, sin = (
        emit.gather_rows(emit.table(t), positions) for t in rope_tables(model, max_model_len)
    )
    for layer in range(segment.first_layer, segment.last_layer):
        group, index = divmod(layer - segment.first_layer, family.group_size)
        x = decoder_layer(emit, model, layer, x, cos, sin, group=group, index_in_group=index)
    emit.output("hidden", x)


def describe_head(emit: Emitter[Tensor], family: FamilySpec, weight_name: str) -> None:
    """One LM head, for the exits of all tiers that share it.

    Inputs: `rows` [num_rows, hidden], `gains` [num_tiers, hidden], `tiers` [num_exits] int32: whose
    gain each exit takes; and what the backend's exit reads. Output: `logits` [num_exits,
    vocab_size].
    """
    model = family.model
    rows = emit.input("rows", "activation", (-1, model.hidden_size))
    gains = emit.input("gains", "activation", (len(family.tiers), model.hidden_size))
    tiers = emit.input("tiers", "int32", (-1,))
    x = emit.tier_exit(rows, tiers, gains, model.rms_norm_eps)
    emit.output("logits", emit.linear(x, emit.weight(weight_name), None))
