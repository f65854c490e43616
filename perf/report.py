"""How a measurement is reported: medians with their spread, a table for people, one JSON line at
the end.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, in the values' unit."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high), "n": len(values)}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row))
    Console(width=120).print(table)


def finish(result: Mapping[str, Any], out: Path | None) -> None:
    """Print the result as the last line, and keep it in `out` when given."""
    document = {**result, "machine": machine()}
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
