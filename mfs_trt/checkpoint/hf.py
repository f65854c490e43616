"""A Hugging Face folder: config.json, safetensors (one file, or shards and index), tokenizer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mfs_trt.checkpoint.hf_config import config_from_hf
from mfs_trt.checkpoint.names import hf_name
from mfs_trt.checkpoint.reader import check_tensors
from mfs_trt.checkpoint.safetensors_file import SafetensorsFile, TensorInfo
from mfs_trt.dtypes import ITEM_SIZES
from mfs_trt.errors import CheckpointError
from mfs_trt.tensor_names import EMBEDDING, LM_HEAD

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKENIZER_KEYS = ("model_type", "tokenizer_class")  # what AutoTokenizer asks of config.json
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMPARED_ROWS = 4096  # rows of two large matrices compared at a time


class HfCheckpoint:
    """A `CheckpointReader` over a Hugging Face folder; nothing is read before `load`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.source = f"Hugging Face folder {folder.name}"
        self._data = read_json(folder / "config.json")
        self.config = config_from_hf(self._data)
        self._where: dict[str, tuple[SafetensorsFile, str]] = {}  # our name → file, name there
        infos: dict[str, TensorInfo] = {}
        for file in _open_files(folder):
            for stored, info in file.infos().items():
                name = hf_name(stored)
                if name is not None:
                    self._where[name] = (file, stored)
                    infos[name] = info
        self._settle_head(infos)
        check_tensors({name: info.shape for name, info in infos.items()}, self.config, str(folder))
        self.dtype = common_dtype(infos, self._data.get("dtype") or self._data.get("torch_dtype"))
        self.end_token_ids = end_tokens_of_folder(folder)

    def load(self, name: str) -> torch.Tensor:
        file, stored = self._where[name]
        return file.get(stored)

    def write_tokenizer(self, folder: Path) -> bool:
        return copy_tokenizer(self.folder, folder)

    def _settle_head(self, infos: dict[str, TensorInfo]) -> None:
        """Tied checkpoints may carry both tensors, or either one; follow transformers 5.

        Both and equal: tied. Both and different: not tied, whatever the config says. One: it is
        both.
        """
        if not self.config.tie_word_embeddings:
            return
        if LM_HEAD in infos and EMBEDDING not in infos:
            infos[EMBEDDING] = infos.pop(LM_HEAD)
            self._where[EMBEDDING] = self._where.pop(LM_HEAD)
        elif LM_HEAD in infos:
            if infos[LM_HEAD].shape == infos[EMBEDDING].shape and equal_tensors(
                self.load(LM_HEAD), self.load(EMBEDDING)
            ):
                del infos[LM_HEAD], self._where[LM_HEAD]
            else:
                self.config = replace(self.config, tie_word_embeddings=False)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `CheckpointError` naming file and fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def common_dtype(infos: dict[str, TensorInfo], stated: str | None) -> str:
    """The dtype that all tensors have, or else the config's, or else float32."""
    found = {info.dtype for info in infos.values()}
    wrong = sorted(found - set(ITEM_SIZES))
    if wrong:
        name = next(name for name, info in infos.items() if info.dtype in wrong)
        raise CheckpointError(
            f"{name}: expected dtype {', '.join(ITEM_SIZES)}, got {', '.join(wrong)} "
            "(quantised checkpoints are not read)"
        )
    if len(found) == 1:
        return found.pop()
    return stated if stated in ITEM_SIZES else "float32"


def end_tokens_of_folder(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, or else of config.json; ascending, may be empty."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return tuple(sorted(set(value if isinstance(value, list) else [value])))
    return ()


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer files of one folder into another; False when there is no vocabulary.

    A vocabulary without tokenizer.json is turned into one.
    """
    if not any((source / name).is_file() for name in _VOCABULARIES):
        return False
    if not (source / "tokenizer.json").is_file():
        _make_tokenizer_json(source, target)
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)
    if (source / "config.json").is_file():
        data = read_json(source / "config.json")
        needed = {key: data[key] for key in _TOKENIZER_KEYS if key in data}
        if needed:
            (target / "config.json").write_text(json.dumps(needed, indent=2) + "\n")
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
    return True


def _make_tokenizer_json(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for files it cannot turn into one
        raise CheckpointError(
            f"{source}: expected tokenizer.json, and transformers cannot make it: {error}"
        ) from error
    tokenizer.save_pretrained(target)


def _open_files(folder: Path) -> list[SafetensorsFile]:
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected an object 'weight_map'")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: expected names of files beside it, got {shard!r}")
        return [SafetensorsFile(folder / shard) for shard in shards]
    if (folder / WEIGHTS_NAME).is_file():
        return [SafetensorsFile(folder / WEIGHTS_NAME)]
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) == 1:
        return [SafetensorsFile(paths[0])]
    if paths:
        names = ", ".join(path.name for path in paths)
        raise CheckpointError(f"{folder}: several safetensors files without {INDEX_NAME}: {names}")
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder}: expected safetensors, got pickled .bin weights; save it with "
            "safe_serialization first"
        )
    raise CheckpointError(f"{folder}: expected {WEIGHTS_NAME} or {INDEX_NAME}, found neither")


def equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices of one shape are equal, compared in slices to spare memory."""
    return all(
        torch.equal(a[i : i + _COMPARED_ROWS], b[i : i + _COMPARED_ROWS])
        for i in range(0, len(a), _COMPARED_ROWS)
    )
