"""Families of every architecture and shape of segments, for an engine's parity with `reference`."""

from tiny_folders import folder_family

FAMILIES = {
    "llama, all biases, m = 1": folder_family((2, 4), qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral, windows, own head, m = 1, 1, 2": folder_family(
        (1, 2, 4), (0,), "mistral", sliding_window=40, windowed_layers=(0, 1, 2, 3)
    ),
    "qwen2, some windows, own heads, m = 1, 3": folder_family(
        (1, 4), (0, 1), "qwen2", qkv_bias=True, sliding_window=9, windowed_layers=(1, 3)
    ),
    "qwen3, tied head, m = 1": folder_family(
        (2, 4, 6), (), "qwen3", qk_norm=True, tie_word_embeddings=True
    ),
    "qwen3, tied and own head, m = 2, 1": folder_family(
        (2, 3), (0,), "qwen3", qk_norm=True, tie_word_embeddings=True
    ),
    "llama, one tier": folder_family((3,)),
}
PLAIN = "mistral, windows, own head, m = 1, 1, 2"
