"""Any checkpoint → one GGUF file: metadata, tokenizer, tensors in llama.cpp's names and order."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from mfs_trt.checkpoint.gguf_config_writer import GGUF_ARCHITECTURES, gguf_fields
from mfs_trt.checkpoint.gguf_tokenizer_writer import tokenizer_fields
from mfs_trt.checkpoint.names import gguf_stored_name
from mfs_trt.checkpoint.reader import CheckpointReader
from mfs_trt.errors import CheckpointError, ConfigError
from mfs_trt.tensor_names import tensor_shapes

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's codes of `general.file_type`
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_END_KEYS = ("eos", "eot", "eom")  # each names one end token


def write_gguf_checkpoint(
    reader: CheckpointReader,
    path: Path | str,
    *,
    with_tokenizer: bool = True,
    force: bool = False,
) -> None:
    """Write the file, with one tensor in memory at a time; there whole, or not at all.

    Matrices in `reader.dtype`, vectors in float32 as llama.cpp wants them. A checkpoint
    without tokenizer gives a file without one. Raises `CheckpointError` when the format
    cannot express the model or its tokenizer, and `ConfigError` when `path` exists and `force` is
    not set or it is not a file.
    """
    path = Path(path).absolute()
    if path.exists() and not (force and path.is_file()):
        hint = "; --force replaces it" if path.is_file() else ", which is not a file"
        raise ConfigError(f"{path}: exists already{hint}")
    if reader.dtype not in _KINDS:
        raise CheckpointError(
            f"dtype: GGUF holds {', '.join(_KINDS)}, got {reader.dtype}; choose one with --dtype"
        )
    fields, rope_tensors = gguf_fields(reader.config)
    fields |= _end_fields(reader.end_token_ids)
    if with_tokenizer:
        fields |= _tokenizer_fields(reader)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        _write(draft, reader, path.stem, fields, rope_tensors)
        os.replace(draft, path)


def halves_to_interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k from Hugging Face's rotary order (halves) to llama.cpp's (adjacent pairs).

    `tensor`: [num_heads * head_dim, ...].
    """
    halves = tensor.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(tensor.shape)


def _write(
    path: Path,
    reader: CheckpointReader,
    name: str,
    fields: dict[str, Any],
    rope_tensors: dict[str, np.ndarray],
) -> None:
    architecture = GGUF_ARCHITECTURES[reader.config.architecture]
    kind = _KINDS[reader.dtype]
    shapes = tensor_shapes(reader.config)
    writer = GGUFWriter(path, architecture)
    try:
        writer.add_name(name)
        writer.add_file_type(_FILE_TYPES[kind])
        for key, value in fields.items():
            _add_field(writer, key, value)
        for stored, array in rope_tensors.items():
            _announce(writer, stored, array.shape, "F32")
        for ours, shape in shapes.items():
            _announce(writer, gguf_stored_name(ours), shape, kind if len(shape) > 1 else "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in rope_tensors.values():
            writer.write_tensor_data(array)
        for ours, shape in shapes.items():
            tensor = _reordered(reader, ours, architecture)
            writer.write_tensor_data(_stored(tensor, kind if len(shape) > 1 else "F32"))
    finally:
        writer.close()


def _reordered(reader: CheckpointReader, name: str, architecture: str) -> torch.Tensor:
    """Only its LLaMA rotates adjacent pairs; its Qwen rotates halves."""
    tensor = reader.load(name)
    if architecture != "llama":
        return tensor
    if ".self_attn.q_proj." in name:
        return halves_to_interleaved(tensor, reader.config.num_heads)
    if ".self_attn.k_proj." in name:
        return halves_to_interleaved(tensor, reader.config.num_kv_heads)
    return tensor


def _stored(tensor: torch.Tensor, kind: str) -> np.ndarray:
    if kind == "F32":
        return tensor.float().contiguous().numpy()
    if kind == "BF16":
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.contiguous().numpy()


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    dtype = np.dtype(_STORED[kind])
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    writer.add_tensor_info(name, shape, dtype, num_bytes, GGMLQuantizationType[kind])


def _add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    for kind, value_type in (
        (bool, GGUFValueType.BOOL),  # a bool is an int too: first
        (int, GGUFValueType.UINT32),
        (float, GGUFValueType.FLOAT32),
        (str, GGUFValueType.STRING),
    ):
        if isinstance(value, kind):
            writer.add_key_value(key, value, value_type)
            return
    raise AssertionError(f"{key}: {type(value).__name__}")


def _end_fields(end_token_ids: tuple[int, ...]) -> dict[str, int]:
    if len(end_token_ids) > len(_END_KEYS):
        raise CheckpointError(
            f"end_token_ids: GGUF names at most {len(_END_KEYS)}, got {list(end_token_ids)}"
        )
    return {
        f"tokenizer.ggml.{key}_token_id": token_id
        for key, token_id in zip(_END_KEYS, end_token_ids, strict=False)
    }


def _tokenizer_fields(reader: CheckpointReader) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if not reader.write_tokenizer(Path(folder)):
            return {}
        return tokenizer_fields(Path(folder), reader.config.vocab_size)
