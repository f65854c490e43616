"""NVIDIA's perf_analyzer as a function: set up its libraries, run it, read its profile export."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARIES = ("libb64.so.0d", "libcudart.so.12")  # its needs that pytriton ships under hashed names


@dataclass(frozen=True)
class Response:
    """One request of a run, seen from the client."""

    tier: str
    started_ns: int
    token_times_ns: tuple[int, ...]  # arrival of each response; a step gives one token each


def run(
    arguments: Sequence[str], inputs: list[dict[str, Any]], scratch: Path, name: str
) -> list[Response]:
    """Run perf_analyzer on `inputs`; raises `RuntimeError` with its output when it fails."""
    data, export = scratch / f"{name}-inputs.json", scratch / f"{name}-profile.json"
    data.write_text(json.dumps({"data": inputs}))
    command = [
        _binary(),
        *arguments,
        f"--input-data={data}",
        f"--profile-export-file={export}",
        "--async",
        "--stability-percentage=999",
        "--measurement-mode=count_windows",
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(_link_libraries(scratch / "libraries"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not export.exists():
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    experiments = json.loads(export.read_text())["experiments"]
    return [_response(r) for e in experiments for r in e["requests"] if r["response_timestamps"]]


def _binary() -> str:
    beside = Path(sys.executable).parent / "perf_analyzer"
    found = str(beside) if beside.exists() else shutil.which("perf_analyzer")
    if not found:
        raise RuntimeError("perf_analyzer not found: pip install -e '.[perf]'")
    return found


def _link_libraries(folder: Path) -> Path:
    """Links from the names that perf_analyzer asks for to pytriton's copies."""
    import pytriton

    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(pytriton.__path__[0]).parent / "nvidia_pytriton.libs"
    for library in LIBRARIES:
        stem = library.split(".so")[0]
        target = next(shipped.glob(f"{stem}-*.so*"))
        link = folder / library
        if not link.exists():
            link.symlink_to(target)
    return folder


def _response(request: dict[str, Any]) -> Response:
    """Tier and arrival times; a response that only carries the final flag has no text and is no
    token.
    """
    times, tier = [], ""
    for time_ns, outputs in zip(
        request["response_timestamps"], request["response_outputs"], strict=True
    ):
        fields = _fields(outputs)
        if fields:
            times.append(time_ns)
            tier = fields.get("tier_used", tier)
    return Response(str(tier), request["timestamp"], tuple(times))


def _fields(outputs: dict[str, Any]) -> dict[str, Any]:
    """Output tensors of a gRPC response, or the JSON of a server-sent event."""
    if "response" not in outputs:
        return outputs
    text = outputs["response"].strip().removeprefix("data:").strip()
    return json.loads(text) if text else {}
