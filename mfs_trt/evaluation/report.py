"""A report folder: report.json for machines, report.md for people, plots beside them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfs_trt.errors import ConfigError
from mfs_trt.evaluation.evaluation import Evaluation
from mfs_trt.evaluation.gates import GateResult
from mfs_trt.family.spec import FamilySpec

JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"
LOSS_PLOT, ACCEPTANCE_PLOT = "loss.png", "acceptance.png"


@dataclass(frozen=True)
class Report:
    """What was evaluated, on what, and what came out."""

    family: str
    spec: FamilySpec
    data: str
    seq_length: int
    num_sequences: int
    dtype: str
    evaluation: Evaluation
    metrics: Mapping[str, float]  # with changes against the baseline, where there is one
    gates: tuple[GateResult, ...] = ()

    @property
    def is_passed(self) -> bool:
        return all(result.is_passed for result in self.gates)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "revision": self.spec.revision,
            "data": self.data,
            "seq_length": self.seq_length,
            "num_sequences": self.num_sequences,
            "dtype": self.dtype,
            "tiers": [
                {**asdict(row), "perplexity": row.perplexity} for row in self.evaluation.losses
            ],
            "pairs": [asdict(row) for row in self.evaluation.pairs],
            "metrics": dict(self.metrics),
            "gates": [
                {"gate": str(r.gate), "value": r.value, "is_passed": r.is_passed}
                for r in self.gates
            ],
            "is_passed": self.is_passed,
        }

    def to_markdown(self) -> str:
        losses, pairs = self.evaluation.losses, self.evaluation.pairs
        lines = [
            f"# {Path(self.family).name}, revision {self.spec.revision[:12]}",
            "",
            f"{losses[0].num_tokens:,} held-out tokens of {self.data} in {self.num_sequences} "
            f"sequences of {self.seq_length}, computed in {self.dtype}.",
            "",
            *_table(
                ("tier", "layers", "loss", "± standard error", "perplexity"),
                [
                    (r.tier, r.exit_layer, f"{r.loss:.4f}", f"{r.standard_error:.4f}",
                     f"{r.perplexity:.4g}")
                    for r in losses
                ],
            ),
            f"![loss per tier]({LOSS_PLOT})",
            "",
        ]  # fmt: skip
        if pairs:
            rows = [
                (r.draft, r.target, f"{r.greedy_agreement:.3f}", f"{r.acceptance:.3f}")
                for r in pairs
            ]
            lines += _table(("draft", "target", "same greedy token", "acceptance"), rows)
            lines += [f"![acceptance]({ACCEPTANCE_PLOT})", ""]
        if self.gates:
            rows = [
                (r.gate, f"{r.value:.4g}", "pass" if r.is_passed else "FAIL") for r in self.gates
            ]
            lines += _table(("gate", "value", "result"), rows)
        return "\n".join(lines)


def write_report(report: Report, folder: Path | str) -> None:
    """Write the four files, replacing those of an earlier report; other files stay.

    Raises `ConfigError` without matplotlib, before anything is written.
    """
    load_pyplot()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plot_losses(report.evaluation, folder / LOSS_PLOT)
    if report.evaluation.pairs:
        plot_acceptance(report.evaluation, folder / ACCEPTANCE_PLOT)
    (folder / MARKDOWN_NAME).write_text(report.to_markdown() + "\n", encoding="utf-8")
    text = json.dumps(report.to_json(), indent=1) + "\n"
    draft = folder / f".{JSON_NAME}"
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, folder / JSON_NAME)


def read_metrics(path: Path | str) -> dict[str, float]:
    """The figures of a report folder or its report.json; raises `ConfigError` for anything else."""
    path = Path(path)
    file = path / JSON_NAME if path.is_dir() else path
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
        return {str(name): float(value) for name, value in metrics.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: expected a report of `mfs-trt eval`, got: {error}") from None


def plot_losses(evaluation: Evaluation, path: Path) -> None:
    """Loss over depth, one point a tier, with two standard errors."""
    figure, axes = load_pyplot().subplots(figsize=(6, 4))
    rows = evaluation.losses
    depths = [row.exit_layer for row in rows]
    errors = [2 * row.standard_error for row in rows]
    axes.errorbar(depths, [row.loss for row in rows], yerr=errors, marker="o", capsize=3)
    for row in rows:
        axes.annotate(row.tier, (row.exit_layer, row.loss), (5, 5), textcoords="offset points")
    axes.set_xlabel("layers")
    axes.set_ylabel("held-out loss, nats per token")
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def plot_acceptance(evaluation: Evaluation, path: Path) -> None:
    """Acceptance of each tier's drafts by each higher tier, as a matrix."""
    names = [row.tier for row in evaluation.losses]
    matrix = [[float("nan")] * len(names) for _ in names]
    figure, axes = load_pyplot().subplots(figsize=(1.5 + len(names), 1 + len(names)))
    for pair in evaluation.pairs:
        row, column = names.index(pair.draft), names.index(pair.target)
        matrix[row][column] = pair.acceptance
        axes.text(column, row, f"{pair.acceptance:.2f}", ha="center", va="center")
    axes.imshow(matrix, vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("target")
    axes.set_ylabel("draft")
    axes.set_title("acceptance")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)


def load_pyplot() -> Any:
    """matplotlib for files; raises `ConfigError` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'mfs-trt[eval]'") from None
    matplotlib.use("Agg")  # files only: no display is needed
    from matplotlib import pyplot

    return pyplot


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [*(f"| {' | '.join(map(str, row))} |" for row in lines), ""]
