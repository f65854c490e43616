"""World: the processes of one training, alone or started by `torchrun`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class World:
    """Rank, size and device of this process, and how it shares work with the others.

    `shards`: parameters, gradients and optimizer state are split over the processes (FSDP2);
    otherwise every process holds all of them (DDP). One process needs neither.
    """

    def __init__(self, rank: int, size: int, device: torch.device, *, shards: bool = False) -> None:
        self.rank, self.size, self.device, self.shards = rank, size, device, shards

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, objective: nn.Module) -> nn.Module:
        """The objective with gradients averaged over the processes."""
        if self.size == 1:
            return objective
        if self.shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            for layer in objective.model.layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(objective, mesh=mesh)
        # Exits of tiers that a stage does not train take no part in its steps.
        return nn.parallel.DistributedDataParallel(objective, find_unused_parameters=True)

    def accumulating(self, module: nn.Module, is_last: bool) -> Any:
        """Context of one micro-batch: gradients are exchanged with the last one."""
        if self.size == 1:
            return nullcontext()
        if self.shards:
            module.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last else module.no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """Summed over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def open_world(shards: bool) -> Iterator[World]:
    """The world that the environment describes: `torchrun` sets RANK and WORLD_SIZE."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device or torch.device("cpu"))
        return
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield World(rank, size, device or torch.device("cpu"), shards=shards)
    finally:
        dist.destroy_process_group()
