"""What each tier costs: parameters, weight bytes, KV bytes and arithmetic per token. Pure."""

from dataclasses import dataclass
from math import prod

from mfs_trt.dtypes import item_size
from mfs_trt.family.spec import FamilySpec
from mfs_trt.model_config import ModelConfig
from mfs_trt.tensor_names import layer_tensor_shapes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class TierCosts:
    """One tier: what it adds to the tier below, and what a server that goes up to it holds."""

    name: str
    exit_layer: int
    num_layers: int  # of the tier's own segment
    num_parameters: int  # added: segment and exit; the first tier brings embedding and shared head
    weight_nbytes: int  # added
    kv_nbytes_per_token: int  # added
    total_parameters: int  # up to and including this tier
    total_weight_nbytes: int
    total_kv_nbytes_per_token: int
    standalone_parameters: int  # as a model of its own, with its exit alone
    flops_per_token: (
        int  # matrix products of a forward pass up to this exit, attention scores left out
    )


def tier_costs(family: FamilySpec, kv_itemsize: int) -> tuple[TierCosts, ...]:
    """Costs of every tier, shallow to deep; `kv_itemsize`: bytes of one KV element."""
    model = family.model
    weight_itemsize = item_size(family.dtype)
    layer, layer_matrices = layer_parameters(model), _layer_matrix_parameters(model)
    gain, head = model.hidden_size, model.vocab_size * model.hidden_size
    shared = head * (1 if model.tie_word_embeddings else 2)  # embedding and shared LM head
    total, rows = 0, []
    for tier, segment in zip(family.tiers, family.segments, strict=True):
        added = segment.num_layers * layer + gain
        added += shared if segment.index == 0 else 0
        added += head if tier.own_head else 0
        total += added
        untied = tier.own_head or not model.tie_word_embeddings
        alone = tier.exit_layer * layer + gain + head * (2 if untied else 1)
        rows.append(
            TierCosts(
                name=tier.name,
                exit_layer=tier.exit_layer,
                num_layers=segment.num_layers,
                num_parameters=added,
                weight_nbytes=added * weight_itemsize,
                kv_nbytes_per_token=segment.num_layers * kv_nbytes_per_layer(model, kv_itemsize),
                total_parameters=total,
                total_weight_nbytes=total * weight_itemsize,
                total_kv_nbytes_per_token=tier.exit_layer * kv_nbytes_per_layer(model, kv_itemsize),
                standalone_parameters=alone,
                flops_per_token=2 * (tier.exit_layer * layer_matrices + head),
            )
        )
    return tuple(rows)


def layer_parameters(model: ModelConfig) -> int:
    return sum(prod(shape) for shape in layer_tensor_shapes(model).values())


def kv_nbytes_per_layer(model: ModelConfig, kv_itemsize: int) -> int:
    """Bytes of keys and values that one token has in one layer."""
    return 2 * model.num_kv_heads * model.head_dim * kv_itemsize


@dataclass(frozen=True)
class Sharing:
    """One family against one server per tier, each with weights and KV of its own."""

    family_nbytes: int
    separate_nbytes: int

    @property
    def ratio(self) -> float:
        return self.separate_nbytes / self.family_nbytes


def weight_sharing(family: FamilySpec) -> Sharing:
    """Weight bytes of the family and of its tiers as separate models."""
    costs = tier_costs(family, kv_itemsize=1)
    separate = sum(tier.standalone_parameters for tier in costs) * item_size(family.dtype)
    return Sharing(costs[-1].total_weight_nbytes, separate)


def freed_kv_tokens(family: FamilySpec, kv_itemsize: int) -> int:
    """Tokens of KV, at the deepest tier, that fit into the weight memory that sharing saves."""
    weights = weight_sharing(family)
    per_token = tier_costs(family, kv_itemsize)[-1].total_kv_nbytes_per_token
    return (weights.separate_nbytes - weights.family_nbytes) // per_token


def format_nbytes(count: float) -> str:
    """`1536` → `1.5 KiB`."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def sharing_summary(family: FamilySpec, kv_dtype: str) -> str:
    """Lines for people: what one server of all tiers saves against one server per tier."""
    weights, kv_itemsize = weight_sharing(family), item_size(kv_dtype)
    costs = tier_costs(family, kv_itemsize)
    per_token = ", ".join(
        f"{format_nbytes(tier.total_kv_nbytes_per_token)} at {tier.name}" for tier in costs
    )
    return (
        f"weights: {format_nbytes(weights.family_nbytes)} for all {len(costs)} tiers, "
        f"{format_nbytes(weights.separate_nbytes)} as separate models ({weights.ratio:.2f}x)\n"
        f"KV: {per_token} per token, in one arena whose frames serve any tier: the busy tier can "
        f"have all of it, not one part in {len(costs)}\n"
        f"the weight memory saved holds {freed_kv_tokens(family, kv_itemsize):,} more tokens "
        f"of KV at {costs[-1].name}"
    )


def _layer_matrix_parameters(model: ModelConfig) -> int:
    shapes = layer_tensor_shapes(model).values()
    return sum(prod(shape) for shape in shapes if len(shape) == 2)
