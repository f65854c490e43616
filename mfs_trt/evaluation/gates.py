"""Quality gates: thresholds on named figures, each passed or failed. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mfs_trt.errors import ConfigError

_GATE = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=)\s*(\S+)\s*")
CHANGE = "change."  # prefix of a figure relative to the baseline's


@dataclass(frozen=True)
class Gate:
    """`metric <= threshold` or `metric >= threshold`."""

    metric: str
    relation: str  # <= or >=
    threshold: float

    def holds(self, value: float) -> bool:
        """False for a figure that is not a number."""
        return value <= self.threshold if self.relation == "<=" else value >= self.threshold

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.threshold:g}"


@dataclass(frozen=True)
class GateResult:
    gate: Gate
    value: float
    is_passed: bool


def parse_gate(text: str) -> Gate:
    """Read `loss.small<=3.2`; raises `ConfigError` for anything else."""
    match = _GATE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        return Gate(match[1], match[2], float(match[3]))
    except ValueError:
        raise ConfigError(
            f"gate: expected a figure, <= or >=, and a number, as loss.small<=3.2, got {text!r}"
        ) from None


def check_gates(gates: Sequence[Gate], metrics: Mapping[str, float]) -> tuple[GateResult, ...]:
    """Hold every gate against its figure; raises `ConfigError` naming an unknown figure."""
    for gate in gates:
        if gate.metric not in metrics:
            raise ConfigError(f"gate: expected one of {', '.join(metrics)}, got {gate.metric!r}")
    values = [metrics[gate.metric] for gate in gates]
    return tuple(
        GateResult(gate, value, gate.holds(value))
        for gate, value in zip(gates, values, strict=True)
    )


def with_changes(metrics: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    """`metrics`, and for each that the baseline has too `change.<name>`: its relative difference,
    0.01 for one percent more.
    """
    changes = {
        f"{CHANGE}{name}": value / baseline[name] - 1
        for name, value in metrics.items()
        if baseline.get(name)
    }
    return {**metrics, **changes}
