"""PrecipitationConfig: the settings of one training, checked before any work.

Defaults are the recipe of the MFS paper (EuroSys 2026, section 4).
"""

from dataclasses import dataclass

from mfs_trt.errors import ConfigError

SCHEDULES = ("stepwise", "joint")
BALANCES = ("fixed", "ramp", "gradient_norm")
TRAINED_PARTS = ("all", "lora", "exits")
AUTOCAST_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PrecipitationConfig:
    """Raises `ConfigError` naming the setting, what it may be and the value."""

    # data: a step takes batch_size sequences of seq_length tokens
    seq_length: int = 4096
    batch_size: int = 64
    micro_batch_size: int = 1  # sequences per forward pass and process
    # schedule
    schedule: str = "stepwise"
    num_steps: int = 2500  # of all stages together
    learning_rate: float = 2e-5  # at the start of a stage; falls to 0 by half a cosine
    warmup_steps: int = 0  # of each stage
    weight_decay: float = 0.1  # of matrices; gains have none
    max_grad_norm: float = 0.3
    # losses
    tier_weight: float = 1.0  # λ of every tier below the top
    balance: str = "fixed"  # ramp: λ grows over its stage; gradient_norm: λ evens out the tiers
    distill_weight: float = 0.0  # share of a low tier's loss that is KL to the top tier
    distill_temperature: float = 1.0
    distill_top_n: int = 0  # of the top tier's tokens; 0: all
    anchor_weight: float = 0.0  # KL of the top tier to the model that training starts from
    # what is trained
    trains: str = "all"  # lora: low-rank adapters of every matrix; exits: gains and heads only
    lora_rank: int = 16
    shares_exit_norm: bool = False  # True: one gain for all exits
    # how
    autocast: str = "bfloat16"
    recompute_layers: bool = False  # activation checkpointing
    loss_rows: int = 256  # rows whose logits exist at one time, of every exit
    balance_every: int = 50  # steps between measurements of the tiers' gradient norms
    checkpoint_every: int = 100
    evaluate_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "schedule": SCHEDULES,
            "balance": BALANCES,
            "trains": TRAINED_PARTS,
            "autocast": AUTOCAST_DTYPES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name}: expected {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in (
            "seq_length",
            "batch_size",
            "micro_batch_size",
            "num_steps",
            "lora_rank",
            "loss_rows",
            "balance_every",
            "checkpoint_every",
            "evaluate_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "tier_weight",
            "distill_top_n",
            "anchor_weight",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not 0 <= self.distill_weight <= 1:
            raise ConfigError(f"distill_weight: expected 0 to 1, got {self.distill_weight}")
        if not self.distill_temperature > 0:
            raise ConfigError(
                f"distill_temperature: expected above 0, got {self.distill_temperature}"
            )
