"""Any checkpoint → a Hugging Face folder: config.json, model.safetensors, tokenizer files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfs_trt.atomic_folder import atomic_folder
from mfs_trt.checkpoint.hf import WEIGHTS_NAME, read_json
from mfs_trt.checkpoint.hf_config import config_to_hf
from mfs_trt.checkpoint.reader import CheckpointReader
from mfs_trt.checkpoint.safetensors_file import SafetensorsWriter
from mfs_trt.tensor_names import LM_HEAD, tensor_shapes


def write_hf_checkpoint(
    reader: CheckpointReader, folder: Path | str, *, force: bool = False
) -> None:
    """Write the folder, with one tensor in memory at a time; there whole, or not at all.

    The reader's `load` must give every tensor in `reader.dtype`. Raises `CheckpointError` when
    config.json cannot express the model, and `ConfigError` when `folder` holds anything but a
    checkpoint in one file, or one and `force` is not set.
    """
    data = config_to_hf(reader.config, reader.dtype)
    shapes = tensor_shapes(reader.config)
    header = [(stored_name(name), shape, reader.dtype) for name, shape in shapes.items()]
    with atomic_folder(Path(folder), WEIGHTS_NAME, force) as draft:
        reader.write_tokenizer(draft)
        asked = read_json(draft / "config.json") if (draft / "config.json").is_file() else {}
        if "tokenizer_class" in asked:
            data["tokenizer_class"] = asked["tokenizer_class"]
        data["eos_token_id"] = end_tokens_json(reader.end_token_ids)
        data["bos_token_id"] = None  # transformers would assume LLaMA-2's
        write_json(draft / "config.json", data)
        write_generation_config(draft, reader.end_token_ids)
        with SafetensorsWriter(draft / WEIGHTS_NAME, header) as out:
            for name in shapes:
                out.write(reader.load(name))


def stored_name(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` → `model.layers.3.mlp.up_proj.weight`."""
    return name if name == LM_HEAD else f"model.{name}"


def write_generation_config(folder: Path, end_token_ids: Sequence[int]) -> None:
    """Name the end tokens in generation_config.json, keeping what else it says."""
    path = folder / "generation_config.json"
    data = read_json(path) if path.is_file() else {}
    if end_token_ids:
        data["eos_token_id"] = end_tokens_json(end_token_ids)
    if data:
        write_json(path, data)


def end_tokens_json(end_token_ids: Sequence[int]) -> int | list[int] | None:
    """As Hugging Face spells it: one id, a list of several, or null."""
    if len(end_token_ids) < 2:
        return end_token_ids[0] if end_token_ids else None
    return list(end_token_ids)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
