"""NestedModel: the family's layers and exits in torch, run one segment at a time."""

import torch
from torch import Tensor, nn

from mfs_trt.family.spec import FamilySpec
from mfs_trt.model.blocks import Attend, DecoderLayer, Exit
from mfs_trt.model.rope import rope_tables
from mfs_trt.weights.store import WeightStore


class NestedModel(nn.Module):
    """Tier k is segments 0..k and `exits[k]`. Nothing here knows requests, blocks or batches.

    Parameter names are the family folder's, so `load_store` is one loop.
    """

    def __init__(self, family: FamilySpec, max_positions: int) -> None:
        super().__init__()
        self.family = family
        config = family.model
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.exits = nn.ModuleDict()
        for tier in family.tiers:
            head = self.lm_head
            if tier.own_head:
                head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.exits[str(tier.exit_layer)] = Exit(config, head)
        cos, sin = rope_tables(config, max_positions)
        self.register_buffer("rope_cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("rope_sin", torch.from_numpy(sin), persistent=False)

    @classmethod
    def from_store(
        cls, store: WeightStore, max_positions: int, dtype: torch.dtype = torch.float32
    ) -> "NestedModel":
        """The model of a family folder, its weights converted to `dtype` one by one."""
        with torch.device("meta"):
            model = cls(store.spec, max_positions)
        cos, sin = rope_tables(store.spec.model, max_positions)
        model.rope_cos = torch.from_numpy(cos).to(dtype)
        model.rope_sin = torch.from_numpy(sin).to(dtype)
        loaded = {name: store.get(name).to(dtype) for name in store.names()}
        if store.spec.model.tie_word_embeddings:
            loaded.setdefault("lm_head.weight", loaded["embed_tokens.weight"])
        for tier in store.spec.tiers:
            own = f"exits.{tier.exit_layer}.lm_head.weight"
            loaded.setdefault(own, loaded["lm_head.weight"])
        model.load_state_dict(loaded, assign=True)
        return model.requires_grad_(False)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden]."""
        return self.embed_tokens(input_ids)

    def run_segment(self, segment: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Layers of one segment. x: [tokens, hidden], positions: [tokens] → [tokens, hidden]."""
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        spec = self.family.segments[segment]
        for i in range(spec.first_layer, spec.last_layer):
            x = self.layers[i](x, cos, sin, attend)
        return x

    def exit_logits(self, segment: int, x: Tensor) -> Tensor:
        """Logits of tier `segment`. x: [rows, hidden] → [rows, vocab_size]."""
        return self.exits[str(self.family.tiers[segment].exit_layer)](x)
