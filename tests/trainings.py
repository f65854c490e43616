"""Tiny trainings: a family folder with a tokenizer, data and settings that run in a second."""

import json
from pathlib import Path

import numpy as np
import torch

from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.packing import PackedTokens
from mfs_trt.precipitation.trainer import Trainer
from mfs_trt.precipitation.world import World
from mfs_trt.weights.writer import TensorEntry, write_family
from tiny import tiny_family, tiny_model
from tiny_tokenizers import build_tokenizer

ALONE = World(0, 1, torch.device("cpu"))


def training_config(**settings) -> PrecipitationConfig:
    small = {
        "seq_length": 16,
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_steps": 6,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "autocast": "float32",
        "loss_rows": 7,
        "checkpoint_every": 2,
        "evaluate_every": 3,
    }
    return PrecipitationConfig(**{**small, **settings})


def random_tokens(
    seq_length: int = 16, count: int = 700, untrained: float = 0.2, seed: int = 0
) -> PackedTokens:
    """Of the tiny vocabulary; a share of them is not trained."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(1, 61, count).astype(np.int32)
    stream = np.where(rng.random(count) < untrained, ~stream, stream)
    return PackedTokens(stream, seq_length, seed, end_token_id=0)


def trainable_model(seed: int = 0, exits=(1, 2, 4), **overrides) -> NestedModel:
    family = tiny_family(exits, **overrides)
    return tiny_model(family, torch.float32, seed).requires_grad_(True)


def tiny_trainer(model: NestedModel | None = None, **settings) -> Trainer:
    config = training_config(**settings)
    return Trainer(model or trainable_model(), random_tokens(), config, ALONE)


def write_trainable_family(folder: Path) -> Path:
    """A family with a tokenizer of a few hundred tokens and three tiers."""
    tokenizer = build_tokenizer("byte_level", folder.parent / f"{folder.name}-tokenizer")
    family = tiny_family(vocab_size=tokenizer.vocab_size)
    model = tiny_model(family, torch.float32)
    weights = model.state_dict()
    entries = [
        TensorEntry(name, shape, "float32", lambda name=name: weights[name])
        for name, shape in family.tensor_shapes().items()
    ]
    inner = tokenizer.folder

    def copy(target: Path) -> None:
        for file in inner.iterdir():
            (target / file.name).write_bytes(file.read_bytes())

    write_family(
        folder,
        family.model,
        family.tiers,
        "float32",
        entries,
        end_token_ids=tokenizer.end_token_ids,
        write_tokenizer=copy,
    )
    return folder


def write_texts(file: Path, count: int = 60) -> Path:
    lines = [
        json.dumps({"text": f"Number {i} says that {i} and one is {i + 1}, as ever."})
        for i in range(count)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
