"""Checkpoints of a training: everything that the next step depends on, written whole or not at
all.
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfs_trt.atomic_folder import atomic_folder
from mfs_trt.errors import TrainingError
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.world import World

STATE_FILE = "state.pt"
CONFIG_FILE = "config.json"
_NAME = re.compile(r"step-(\d+)")
_KEPT = 2


@dataclass(frozen=True)
class Progress:
    """Where a training stands. The data's position follows from `step`."""

    step: int
    num_tokens: int  # whose prediction was trained
    balances: list[float]  # factor of each tier's λ


class Checkpoints:
    """The folder of a training's checkpoints, `step-N` each; the last two are kept."""

    def __init__(self, folder: Path, config: PrecipitationConfig, revision: str) -> None:
        """`revision`: of the family that training starts from; resuming needs both unchanged."""
        self.folder = folder
        self._identity = {"config": asdict(config), "family_revision": revision}

    def latest(self) -> Path | None:
        found = self._steps()
        return self.folder / f"step-{found[-1]}" if found else None

    def save(
        self,
        world: World,
        parameters: dict[str, torch.nn.Parameter],
        optimizer: Optimizer,
        progress: Progress,
    ) -> None:
        """Called by every process; the first one writes."""
        state = {
            "parameters": {name: _whole(p.detach()) for name, p in parameters.items()},
            "optimizer": {
                name: {key: _whole(value) for key, value in optimizer.state[p].items()}
                for name, p in parameters.items()
                if p in optimizer.state
            },
            "progress": asdict(progress),
            "rng": torch.get_rng_state(),
        }
        if world.is_main:
            with atomic_folder(self.folder / f"step-{progress.step}", CONFIG_FILE, True) as draft:
                torch.save(state, draft / STATE_FILE)
                (draft / CONFIG_FILE).write_text(json.dumps(self._identity, indent=2) + "\n")
            for step in self._steps()[:-_KEPT]:
                shutil.rmtree(self.folder / f"step-{step}")
        world.barrier()

    def restore(
        self, folder: Path, parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer
    ) -> Progress:
        """Put a checkpoint back; raises `TrainingError` when it is of another training."""
        found = json.loads((folder / CONFIG_FILE).read_text())
        if found != self._identity:
            raise TrainingError(
                f"{folder}: made with other settings or another family: "
                f"{_difference(found, self._identity)}; give another --work folder"
            )
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, parameter in parameters.items():
                _assign(parameter, state["parameters"][name])
        for name, values in state["optimizer"].items():
            parameter = parameters[name]
            optimizer.state[parameter] = {
                key: _like(parameter, value) for key, value in values.items()
            }
        torch.set_rng_state(state["rng"])
        return Progress(**state["progress"])

    def _steps(self) -> list[int]:
        names: Iterable[str] = (p.name for p in self.folder.glob("step-*"))
        return sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU, also when the processes share it."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole` placed and shared as `parameter` is; scalars, as a step count, stay as they are."""
    if whole.shape != parameter.shape:
        return whole
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole.to(parameter.device)


def _assign(parameter: Tensor, whole: Tensor) -> None:
    parameter.copy_(_like(parameter, whole))


def _difference(found: dict, wanted: dict) -> str:
    if found.get("family_revision") != wanted["family_revision"]:
        return f"family {found.get('family_revision')!s:.12} is not {wanted['family_revision']:.12}"
    pairs = {k: (found["config"].get(k), v) for k, v in wanted["config"].items()}
    return ", ".join(f"{k} was {a}, is {b}" for k, (a, b) in pairs.items() if a != b)
