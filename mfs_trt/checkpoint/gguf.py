"""A GGUF file of the LLaMA architecture: weights dequantised on demand, tokenizer from the file."""

from pathlib import Path

import numpy as np
import torch

from mfs_trt.checkpoint.gguf_config import config_from_gguf
from mfs_trt.checkpoint.gguf_file import GgufFile
from mfs_trt.checkpoint.gguf_tokenizer import write_gguf_tokenizer
from mfs_trt.checkpoint.names import GGUF_ROPE_TENSORS, gguf_name
from mfs_trt.checkpoint.reader import check_tensors
from mfs_trt.errors import CheckpointError

_END_TOKEN_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufCheckpoint:
    """A `CheckpointReader` over a GGUF file; nothing is dequantised before `load`."""

    def __init__(self, path: Path):
        self.source = f"GGUF file {path.name}"
        self._file = GgufFile(path)
        tensors, fields = self._file.tensors, self._file.fields
        rope_factors = {
            name: self._file.load(name) for name in GGUF_ROPE_TENSORS if name in tensors
        }
        stored_shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.config = config_from_gguf(fields, stored_shapes, rope_factors)
        self._stored = {}  # our name → the file's
        for stored in tensors:
            name = gguf_name(stored)
            if name is not None:
                self._stored[name] = stored
        shapes = {name: stored_shapes[stored] for name, stored in self._stored.items()}
        check_tensors(shapes, self.config, str(path))
        self.dtype = self._common_dtype()
        ends = (fields.get(key) for key in _END_TOKEN_KEYS)
        self.end_token_ids = tuple(sorted({int(end) for end in ends if end is not None}))

    def load(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        try:
            array = self._file.load(stored)
        except NotImplementedError:
            kind = self._file.tensors[stored].type_name
            raise CheckpointError(f"{stored}: ggml type {kind} cannot be dequantised") from None
        if ".self_attn.q_proj." in name:
            array = interleaved_to_halves(array, self.config.num_heads)
        elif ".self_attn.k_proj." in name:
            array = interleaved_to_halves(array, self.config.num_kv_heads)
        if array.dtype == np.uint16:
            return torch.from_numpy(array.astype(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array.copy() if not array.flags.writeable else array)

    def write_tokenizer(self, folder: Path) -> bool:
        return write_gguf_tokenizer(self._file.fields, folder)

    def _common_dtype(self) -> str:
        """float32 for anything quantised; else the 16-bit type, beside float32 norms."""
        kinds = {tensor.type_name for tensor in self._file.tensors.values()}
        narrow = kinds - {"F32"}
        if len(narrow) == 1:
            return _FLOAT_DTYPES.get(narrow.pop(), "float32")
        return "float32"


def interleaved_to_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's rotary order (adjacent pairs) to Hugging Face's (halves).

    `array`: [num_heads * head_dim, ...].
    """
    rest = array.shape[1:]
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(array.shape)
