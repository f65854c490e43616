"""Tiny random Hugging Face models, written to disk."""

from pathlib import Path

import torch


def make_hf_folder(folder: Path, architecture: str, **overrides) -> Path:
    """Write a tiny random Hugging Face model (no tokenizer); returns its folder."""
    import transformers

    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }
    config_name, model_name = names[architecture]
    settings = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **overrides,
    }
    config = getattr(transformers, config_name)(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm gains of one and zero biases would hide a wrong order of operations.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return Path(folder)
