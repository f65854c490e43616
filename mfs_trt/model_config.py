"""ModelConfig: the shape of one decoder, in our names; `checkpoint` reads other formats into it."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mfs_trt.errors import CheckpointError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `scaling` holds `scaling_type`'s parameters, HF names."""

    theta: float = 10000.0
    scaling_type: str = "default"  # default, linear, dynamic, yarn, longrope, llama3
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """A dense pre-norm decoder with GQA, RoPE and SwiGLU (LLaMA, Mistral, Qwen2, Qwen3)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k before RoPE (Qwen3)
    tie_word_embeddings: bool = False
    sliding_window: int | None = None  # tokens seen, the current one included
    windowed_layers: tuple[int, ...] = ()  # layers that use `sliding_window`

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}: expected a positive integer, got {value!r}")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"architecture: expected one of {', '.join(ARCHITECTURES)}, "
                f"got {self.architecture!r}"
            )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.rope.scaling_type not in ROPE_TYPES:
            raise CheckpointError(
                f"rope type: expected one of {', '.join(ROPE_TYPES)}, "
                f"got {self.rope.scaling_type!r}"
            )
        if self.windowed_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise CheckpointError(
                f"sliding_window: expected the window of layers {self.windowed_layers}, "
                f"got {self.sliding_window}"
            )

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.windowed_layers else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelConfig":
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise CheckpointError(f"model config: unknown keys {', '.join(unknown)}")
        values = dict(data)
        values["rope"] = RopeConfig(**values["rope"])
        values["windowed_layers"] = tuple(values.get("windowed_layers", ()))
        return cls(**values)
