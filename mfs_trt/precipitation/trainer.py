"""Trainer: the loop of Knowledge Precipitation. One optimizer step a turn, resumable after any."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mfs_trt.errors import ConfigError, TrainingError
from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.balance import tier_balances
from mfs_trt.precipitation.checkpoints import Checkpoints, Progress
from mfs_trt.precipitation.config import PrecipitationConfig
from mfs_trt.precipitation.objective import JointObjective, num_trained_tokens
from mfs_trt.precipitation.packing import IGNORED, PackedTokens
from mfs_trt.precipitation.schedule import learning_rate, stage_at, stages, tier_weights
from mfs_trt.precipitation.world import World


@dataclass(frozen=True)
class StepReport:
    """What one step did. Losses are means over its trained tokens; nan: tier not trained."""

    step: int  # steps done
    num_steps: int
    losses: dict[str, float]  # by tier, in nats per token
    tier_weights: dict[str, float]  # λ
    learning_rate: float
    grad_norm: float  # before clipping
    num_tokens: int  # trained tokens so far
    tokens_per_s: float  # input tokens of all processes
    held_out: dict[str, float]  # by tier, when measured after this step


class Trainer:
    """Trains `model` in place. Data order, schedule and losses follow from config and step."""

    def __init__(
        self,
        model: NestedModel,
        data: PackedTokens,
        config: PrecipitationConfig,
        world: World,
        *,
        anchor: NestedModel | None = None,
        held_out: PackedTokens | None = None,
    ) -> None:
        """`held_out`: every sequence of it is evaluated each `evaluate_every` steps and at the end.

        Raises `ConfigError` when the batch cannot be shared out evenly.
        """
        per_turn = config.micro_batch_size * world.size
        if config.batch_size % per_turn:
            raise ConfigError(
                f"batch_size: expected a multiple of micro_batch_size × processes = {per_turn}, "
                f"got {config.batch_size}"
            )
        if world.shards and config.balance == "gradient_norm":
            raise ConfigError("balance: expected fixed or ramp with --shard, got gradient_norm")
        self.model, self.data, self.config, self.world = model, data, config, world
        self.held_out = held_out
        self.objective = JointObjective(model, config, anchor)
        self._module = world.wrap(self.objective)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = _optimizer(self.parameters, config)
        num_tiers = len(model.family.tiers)
        self._stages = stages(config.schedule, num_tiers, config.num_steps)
        self.progress = Progress(0, 0, [1.0] * num_tiers)

    def run(self, checkpoints: Checkpoints, on_step: Callable[[StepReport], None]) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        Raises `TrainingError` when a loss or gradient is not finite, or resuming is impossible.
        """
        newest = checkpoints.latest()
        if newest is not None:
            self.progress = checkpoints.restore(newest, self.parameters, self.optimizer)
        while self.progress.step < self.config.num_steps:
            try:
                report = self.step()
            except FloatingPointError as error:
                kept = checkpoints.latest()
                raise TrainingError(
                    f"step {self.progress.step + 1}: {error}; "
                    + (f"the last good checkpoint is {kept}" if kept else "no checkpoint yet")
                ) from None
            on_step(report)  # first: a checkpoint must not be ahead of what was told
            done = report.step == self.config.num_steps
            if report.step % self.config.checkpoint_every == 0 or done:
                checkpoints.save(self.world, self.parameters, self.optimizer, self.progress)

    def step(self) -> StepReport:
        """One optimizer step. Raises FloatingPointError, with the model as it was before."""
        started = time.perf_counter()
        config, step = self.config, self.progress.step
        stage = stage_at(self._stages, step)
        batches = self._micro_batches(step)
        balances = self.progress.balances
        if config.balance == "gradient_norm" and step % config.balance_every == 0:
            with self._autocast():
                balances = tier_balances(
                    self.objective, *batches[0], stage.lowest_tier, self.world, balances
                )
        weights = tier_weights(config, stage, step, len(balances), balances)
        num_tokens = self._count_tokens(batches)
        losses = torch.zeros(len(weights), device=self.world.device)
        self._module.train()
        for i, (input_ids, labels) in enumerate(batches):
            with self.world.accumulating(self._module, is_last=i + 1 == len(batches)):
                with self._autocast():
                    total, by_tier = self._module(input_ids, labels, weights)
                # Processes average their gradients; the loss is a mean over all their tokens.
                (total * (self.world.size / num_tokens)).backward()
            losses += by_tier
        self.world.sum(losses)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        trained = [loss for loss, weight in zip(losses, weights, strict=True) if weight]
        if not torch.stack(trained).isfinite().all() or not grad_norm < float("inf"):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"loss {[round(float(x) / num_tokens, 4) for x in trained]} or gradient norm "
                f"{grad_norm} is not finite"
            )
        rate = learning_rate(config, stage, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress = Progress(step + 1, self.progress.num_tokens + num_tokens, balances)
        names = [t.name for t in self.model.family.tiers]
        seen = config.batch_size * config.seq_length
        return StepReport(
            step=step + 1,
            num_steps=config.num_steps,
            losses=dict(zip(names, (losses / num_tokens).tolist(), strict=True)),
            tier_weights=dict(zip(names, weights, strict=True)),
            learning_rate=rate,
            grad_norm=grad_norm,
            num_tokens=self.progress.num_tokens,
            tokens_per_s=seen / (time.perf_counter() - started),
            held_out=self._evaluation_due(),
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Cross entropy per held-out token of every tier, in nats."""
        assert self.held_out is not None
        self._module.eval()
        data, size = self.held_out, self.config.micro_batch_size
        num_tiers = len(self.model.family.tiers)
        sums = torch.zeros(num_tiers + 1, device=self.world.device)
        starts = range(0, data.num_sequences, size)
        # Every process makes the same number of passes, as sharded layers need.
        for turn in range(0, len(starts), self.world.size):
            index = turn + self.world.rank
            count = 0 if index >= len(starts) else min(size, data.num_sequences - starts[index])
            input_ids, labels = data.batch(starts[min(index, len(starts) - 1)], max(1, count))
            if count == 0:
                labels = torch.full_like(labels, IGNORED)
            with self._autocast():
                _, losses = self._module(
                    input_ids.to(self.world.device), labels.to(self.world.device), [1.0] * num_tiers
                )
            sums[:-1] += losses
            sums[-1] += num_trained_tokens(labels)
        self.world.sum(sums)
        names = [t.name for t in self.model.family.tiers]
        return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))

    def _evaluation_due(self) -> dict[str, float]:
        step = self.progress.step
        is_due = step % self.config.evaluate_every == 0 or step == self.config.num_steps
        return self.evaluate() if is_due and self.held_out is not None else {}

    def _micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This process's share of the step's sequences."""
        config, world = self.config, self.world
        share = config.batch_size // world.size
        first = step * config.batch_size + world.rank * share
        size = config.micro_batch_size
        batches = (self.data.batch(first + i, size) for i in range(0, share, size))
        return [(a.to(world.device), b.to(world.device)) for a, b in batches]

    def _count_tokens(self, batches: list[tuple[Tensor, Tensor]]) -> int:
        count = sum(num_trained_tokens(labels) for _, labels in batches)
        total = int(self.world.sum(torch.tensor(count, device=self.world.device)))
        return max(1, total)

    def _autocast(self) -> torch.autocast:
        is_on = self.config.autocast == "bfloat16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=is_on)


def _optimizer(
    parameters: dict[str, nn.Parameter], config: PrecipitationConfig
) -> torch.optim.Optimizer:
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate)
