"""The model that training starts from: a family's, with other exits, cut shorter, or at random."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import FamilySpec, TierSpec
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.tensor_names import exit_head, exit_norm
from mfs_trt.weights.store import WeightStore

_INIT_STD = 0.02


def starting_model(
    store: WeightStore, tiers: Sequence[TierSpec], *, is_random: bool, seed: int
) -> NestedModel:
    """The family's layers `[0, last exit)` in fp32, with an exit after each tier.

    An exit that the family has keeps its gain and head; a new one starts as the top tier's. With
    `is_random` all weights are drawn anew.
    """
    source = store.spec
    depth = tiers[-1].exit_layer
    if depth > source.model.num_layers:
        raise ConfigError(
            f"tiers: expected exits up to layer {source.model.num_layers}, got {depth}"
        )
    windowed = tuple(i for i in source.model.windowed_layers if i < depth)
    config = replace(source.model, num_layers=depth, windowed_layers=windowed)
    family = replace(source, model=config, tiers=tuple(tiers), revision="")
    if is_random:
        return random_model(replace(family, source="pretrained by mfs-trt"), seed)
    family = replace(family, source=f"{source.source or 'a family'}, precipitated")
    model = NestedModel(family, config.max_position_embeddings)
    known = set(store.names())
    top = len(source.tiers) - 1
    loaded = {name: store.get(name) for name in family.tensor_shapes() if name in known}
    for tier in tiers:
        loaded.setdefault(exit_norm(tier.exit_layer), store.get(source.norm_name(top)))
        if tier.own_head:
            loaded.setdefault(exit_head(tier.exit_layer), store.get(source.head_name(top)))
    _load(model, loaded)
    return model


def _load(model: NestedModel, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys(), parameters.keys() ^ tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def random_model(family: FamilySpec, seed: int) -> NestedModel:
    """Weights by GPT-2's rule: normal of 0.02, less where they add to the residual stream."""
    model = NestedModel(family, family.model.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    deep = (2 * len(model.layers)) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0, _INIT_STD * (deep if is_residual else 1), generator=generator)
    return model


def freeze_untrained(model: NestedModel, config: PrecipitationConfig) -> None:
    """Leave a gradient only to what `config.trains`; adds the adapters where it names them."""
    top = model.exits[str(model.family.tiers[-1].exit_layer)]
    if config.shares_exit_norm:
        for tier_exit in model.exits.values():
            tier_exit.norm = top.norm
    if config.trains == "all":
        return
    model.requires_grad_(False)
    for tier in model.family.tiers[:-1]:
        tier_exit = model.exits[str(tier.exit_layer)]
        if not config.shares_exit_norm:
            tier_exit.norm.requires_grad_(True)
        if tier.own_head:
            tier_exit.lm_head.requires_grad_(True)
    if config.trains == "lora":
        _add_adapters(model.layers, config.lora_rank)


def _add_adapters(layers: nn.Module, rank: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "trains: lora needs the package peft (pip install 'mfs-trt[train]')"
        ) from None
    names = [n for n, m in layers.named_modules() if isinstance(m, nn.Linear)]
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    inject_adapter_in_model(settings, layers)


def merged_weights(model: NestedModel) -> dict[str, torch.Tensor]:
    """Weights by their names in a family folder, adapters merged into their matrices."""
    for module in list(model.layers.modules()):
        if hasattr(module, "lora_A"):
            module.merge()
    weights = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    return {name: weights[name] for name in model.family.tensor_shapes()}
