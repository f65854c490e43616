"""A TensorRT-LLM checkpoint folder: config.json and a rank{r}.safetensors per parallel rank.

Reading merges the ranks, writing splits for them. Per layer, q, k and v lie in one matrix; the
MLP's names are swapped against intuition (`mlp.fc` is the gate, `mlp.gate` the up projection); the
vocabulary is padded to a multiple of the ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mfs_trt.atomic_folder import atomic_folder
from mfs_trt.checkpoint.hf import (
    common_dtype,
    copy_tokenizer,
    end_tokens_of_folder,
    equal_tensors,
    read_json,
)
from mfs_trt.checkpoint.hf_writer import write_generation_config, write_json
from mfs_trt.checkpoint.names import TRTLLM_TOP, trtllm_name
from mfs_trt.checkpoint.reader import CheckpointReader, check_shapes
from mfs_trt.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter, TensorInfo
from mfs_trt.checkpoint.trtllm_config import config_from_trtllm, config_to_trtllm
from mfs_trt.checkpoint.trtllm_shards import Shards
from mfs_trt.errors import CheckpointError
from mfs_trt.tensor_names import EMBEDDING, LM_HEAD, tensor_shapes


class TrtllmCheckpoint:
    """A `CheckpointReader` over a TensorRT-LLM checkpoint folder of any tensor-parallel size."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.source = f"TensorRT-LLM checkpoint {folder.name}"
        data = read_json(folder / "config.json")
        self.config = config_from_trtllm(data)
        tp_size = _tensor_parallel_size(data)
        embedding_dim = data.get("embedding_sharding_dim", 0)
        if not data.get("use_parallel_embedding", False):
            embedding_dim = None
        self._shards = Shards(self.config, tp_size, embedding_dim)
        self._ranks = [SafetensorsFile(folder / f"rank{r}.safetensors") for r in range(tp_size)]
        infos: dict[str, TensorInfo] = {}
        for file in self._ranks:
            infos = file.infos()
            self._check_rank(infos, str(file.path))
        self.dtype = common_dtype(infos, data.get("dtype"))
        self._settle_head(infos)
        self.end_token_ids = end_tokens_of_folder(folder)

    def load(self, name: str) -> torch.Tensor:
        stored = trtllm_name(name)
        return self._shards.merge(name, [file.get(stored) for file in self._ranks])

    def write_tokenizer(self, folder: Path) -> bool:
        return copy_tokenizer(self.folder, folder)

    def _check_rank(self, infos: dict[str, TensorInfo], source: str) -> None:
        expected = {}
        for name in tensor_shapes(replace(self.config, tie_word_embeddings=False)):
            expected[trtllm_name(name)] = self._shards.shape(name)
        found = {name: info.shape for name, info in infos.items()}
        if self.config.tie_word_embeddings and TRTLLM_TOP[LM_HEAD] not in found:
            del expected[TRTLLM_TOP[LM_HEAD]]
        for name in (
            EMBEDDING,
            LM_HEAD,
        ):  # more padding of the vocabulary than needed is trimmed too
            stored = TRTLLM_TOP[name]
            if stored in found and stored in expected:
                rows, *rest = expected[stored]
                expected[stored] = (max(rows, found[stored][0]), *rest)
        check_shapes(found, expected, source)

    def _settle_head(self, infos: dict[str, TensorInfo]) -> None:
        """A tied checkpoint usually carries the head too; where that differs, it is not tied."""
        if self.config.tie_word_embeddings and TRTLLM_TOP[LM_HEAD] in infos:
            tied = equal_tensors(self.load(LM_HEAD), self.load(EMBEDDING))
            self.config = replace(self.config, tie_word_embeddings=tied)


def write_trtllm_checkpoint(
    reader: CheckpointReader,
    folder: Path | str,
    tp: int = 1,
    *,
    force: bool = False,
) -> None:
    """Write a TensorRT-LLM checkpoint for `tp` ranks, tensor by tensor, tokenizer files beside it.

    The reader's `load` must give every tensor in `reader.dtype`; of a tied model it is asked for
    the head all the same. Raises `CheckpointError` when the format cannot express the model or `tp`
    does not divide it, and `ConfigError` when `folder` holds anything but a checkpoint, or one and
    `force` is not set.
    """
    model = reader.config
    data = config_to_trtllm(model, reader.dtype, tp)
    shards = Shards(model, tp, embedding_dim=None)
    names = tensor_shapes(
        replace(model, tie_word_embeddings=False)
    )  # the format wants a head anyway
    stored_names = list(dict.fromkeys(trtllm_name(name) for name in names))
    with atomic_folder(Path(folder), "rank0.safetensors", force) as draft:
        reader.write_tokenizer(draft)
        write_json(draft / "config.json", data)
        write_generation_config(draft, reader.end_token_ids)
        for rank in range(tp):
            _write_rank(draft, rank, shards, stored_names, reader.load, reader.dtype)


def _write_rank(
    folder: Path,
    rank: int,
    shards: Shards,
    stored_names: list[str],
    load: Callable[[str], torch.Tensor],
    dtype: str,
) -> None:
    pieces = {name: shards.pieces(name) for name in stored_names}
    header = [(name, shards.shape(pieces[name][0]), dtype) for name in stored_names]
    with SafetensorsWriter(folder / f"rank{rank}.safetensors", header) as out:
        for name in stored_names:
            parts = [shards.split(piece, load(piece), rank=rank) for piece in pieces[name]]
            out.write(torch.cat(parts) if len(parts) > 1 else parts[0])


def _tensor_parallel_size(data: dict[str, Any]) -> int:
    mapping = data.get("mapping") or {}
    tp_size, pp_size = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
    if pp_size != 1 or mapping.get("cp_size", 1) != 1:
        raise CheckpointError(
            f"mapping: expected pp_size 1 and cp_size 1, got pp_size {pp_size}, "
            f"cp_size {mapping.get('cp_size', 1)}"
        )
    if mapping.get("world_size", tp_size) != tp_size:
        raise CheckpointError(
            f"mapping.world_size: expected tp_size {tp_size}, got {mapping['world_size']}"
        )
    return int(tp_size)
