"""Parts of a decoder in torch: attention, MLP, exit; on the operators of `plugins.reference`."""

from collections.abc import Callable

from torch import Tensor, nn

from mfs_trt.model_config import ModelConfig
from mfs_trt.plugins import reference as ops

# (layer, query [n, heads, d], key [n, kv_heads, d], value) → [n, heads, d]: how a row sees others
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, optional QK norm and rotary embedding; `attend` does the rest."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, d = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(hidden, num_heads * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, num_kv_heads * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, num_kv_heads * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_heads * d, hidden, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.rms_norm_eps)
            self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        d = self.config.head_dim
        query = self.q_proj(x).unflatten(-1, (-1, d))
        key = self.k_proj(x).unflatten(-1, (-1, d))
        value = self.v_proj(x).unflatten(-1, (-1, d))
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = ops.rotary_embedding(query, cos, sin)
        key = ops.rotary_embedding(key, cos, sin)
        return self.o_proj(attend(self.layer, query, key, value).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals. Rows are packed: x is [tokens, hidden]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Exit(nn.Module):
    """A tier's exit: its norm gain and an LM head, shared with other tiers or its own."""

    def __init__(self, config: ModelConfig, head: nn.Linear) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = head

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, hidden] → logits [rows, vocab_size]."""
        return self.lm_head(self.norm(x))
