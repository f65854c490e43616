"""Hugging Face's config.json ↔ `ModelConfig`, with transformers' defaults for missing keys."""

from dataclasses import fields
from typing import Any

from mfs_trt.errors import CheckpointError
from mfs_trt.model_config import ARCHITECTURES, ModelConfig, RopeConfig

# What transformers assumes for a key that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
_DEFAULT_WINDOW = 4096  # Qwen, with use_sliding_window
_DEFAULT_MAX_WINDOW_LAYERS = 28  # Qwen: layers below it attend to everything
# Per rope type: keys that must be there, then keys that may be; transformers ignores any other.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def config_from_hf(data: dict[str, Any]) -> ModelConfig:
    """Read a parsed config.json; raises `CheckpointError` naming the key that cannot be served."""
    architecture = _architecture(data)
    defaults = _DEFAULTS[architecture]

    def value(key: str, default: Any = None) -> Any:
        return data.get(key, defaults.get(key, default))

    def required(key: str) -> Any:
        if data.get(key) is None:
            raise CheckpointError(f"config.json: expected the key {key!r}, which is missing")
        return data[key]

    activation = value("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act: expected silu, got {activation!r}")
    num_heads = required("num_attention_heads")
    num_layers = required("num_hidden_layers")
    hidden_size = required("hidden_size")
    max_positions = value("max_position_embeddings")
    window, windowed_layers = _windows(architecture, data, num_layers)
    takes_attention_bias = architecture in ("llama", "qwen3")
    attention_bias = takes_attention_bias and bool(value("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=required("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=value("num_key_value_heads") or num_heads,
        head_dim=value("head_dim") or hidden_size // num_heads,
        rms_norm_eps=value("rms_norm_eps", 1e-6),
        rope=rope_from_hf(data, max_positions),
        max_position_embeddings=max_positions,
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(value("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=bool(value("tie_word_embeddings", False)),
        sliding_window=window,
        windowed_layers=windowed_layers,
    )


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a checkpoint, in the spelling of transformers 5 and the one before.

    Raises `CheckpointError` naming what the architecture's config.json cannot express.
    """
    rope = {
        "rope_type": config.rope.scaling_type,
        "rope_theta": config.rope.theta,
        **config.rope.scaling,
    }
    is_scaled = config.rope.scaling_type != "default"
    data: dict[str, Any] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": config.rope.theta,
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if is_scaled else None,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.architecture in ("llama", "qwen3"):
        data["attention_bias"] = config.o_bias
    if config.architecture == "llama":
        data["mlp_bias"] = config.mlp_bias
    if config.architecture == "mistral":
        data["sliding_window"] = config.sliding_window
    if config.architecture in ("qwen2", "qwen3"):
        data |= _qwen_windows(config)
    found = config_from_hf(data)
    lost = [
        f"{f.name} {getattr(config, f.name)}"
        for f in fields(ModelConfig)
        if getattr(found, f.name) != getattr(config, f.name)
    ]
    if lost:
        raise CheckpointError(
            f"a Hugging Face {config.architecture} config.json cannot express {', '.join(lost)}"
        )
    return data


def _qwen_windows(config: ModelConfig) -> dict[str, Any]:
    windowed = config.windowed_layers
    if not windowed:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": windowed[0],
        "layer_types": [kinds[layer in windowed] for layer in range(config.num_layers)],
    }


def rope_from_hf(data: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Rotary settings in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    The returned `scaling` holds what its type uses, `original_max_position_embeddings` always
    included.
    """
    settings = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    if any(isinstance(entry, dict) for entry in settings.values()):
        raise CheckpointError(
            f"rope_parameters: expected one setting for all layers, got one per layer type "
            f"({', '.join(settings)})"
        )
    theta = settings.pop("rope_theta", None) or data.get("rope_theta") or 10000.0
    partial = settings.pop("partial_rotary_factor", None) or data.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor: expected 1.0, got {partial}")
    old_type, new_type = settings.pop("type", None), settings.pop("rope_type", None)
    scaling_type = new_type or old_type or "default"
    if scaling_type == "su":  # longrope's name before transformers 4.44
        scaling_type = "longrope"
    if scaling_type in ("llama3", "yarn", "longrope"):
        original = data.get("original_max_position_embeddings")
        if original is not None:
            settings["original_max_position_embeddings"] = original
        settings.setdefault("original_max_position_embeddings", max_position_embeddings)
    if scaling_type not in _ROPE_KEYS:
        raise CheckpointError(
            f"rope type: expected one of {', '.join(_ROPE_KEYS)}, got {scaling_type!r}"
        )
    required, optional = _ROPE_KEYS[scaling_type]
    scaling = {key: settings.get(key) for key in (*required, *optional)}
    for key in required:
        if scaling[key] is None:
            raise CheckpointError(f"rope type {scaling_type}: expected the key {key!r}")
    scaling = {key: value for key, value in sorted(scaling.items()) if value is not None}
    return RopeConfig(theta=float(theta), scaling_type=scaling_type, scaling=scaling)


def _architecture(data: dict[str, Any]) -> str:
    model_type = data.get("model_type")
    classes = data.get("architectures") or []
    experts = [key for key in _MOE_KEYS if data.get(key)]
    if experts or "moe" in str(model_type).lower() or model_type == "mixtral":
        raise CheckpointError(
            f"model_type {model_type!r} is a mixture of experts (MoE): "
            f"expected a dense model of type {', '.join(ARCHITECTURES)}"
        )
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"model_type: expected one of {', '.join(ARCHITECTURES)}, got {model_type!r}"
        )
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unnamed")
        raise CheckpointError(
            f"quantization_config: expected unquantised weights, got quant_method {method!r}"
        )
    for name in classes:
        if not name.endswith("ForCausalLM"):
            raise CheckpointError(f"architectures: expected a …ForCausalLM, got {name!r}")
    return str(model_type)


def _windows(
    architecture: str, data: dict[str, Any], num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """Window size and the layers that use it, by each architecture's own rule in transformers."""
    if architecture == "mistral":
        window = data.get("sliding_window", _DEFAULTS["mistral"]["sliding_window"])
        return window, tuple(range(num_layers)) if window is not None else ()
    if architecture == "llama":
        return None, ()
    window = data.get("sliding_window", _DEFAULT_WINDOW)
    if not data.get("use_sliding_window", False):
        window = None
    layer_types = data.get("layer_types")
    if layer_types is None:
        first = data.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        layers = tuple(range(first, num_layers)) if window is not None else ()
        return window if layers else None, layers
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer_types: expected full_attention or sliding_attention, got {', '.join(unknown)}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types: expected {num_layers} entries, got {len(layer_types)}")
    layers = tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
    return window if layers else None, layers
