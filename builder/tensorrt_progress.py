"""What a TensorRT build is doing, phase by phase, told while it runs."""

from collections.abc import Callable
from typing import Any

OnPhase = Callable[[str, float], None]  # (plan and phase, share of it that is done)


def make_monitor(trt: Any, plan: str, on_phase: OnPhase) -> Any:
    """An `IProgressMonitor` of the module `trt` for the build of `plan`; it never stops a build."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._num_steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._num_steps[phase_name] = max(1, num_steps)
            on_phase(f"{plan}: {phase_name}", 0.0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            done = min(1.0, (step + 1) / self._num_steps.get(phase_name, 1))
            on_phase(f"{plan}: {phase_name}", done)
            return True

        def phase_finish(self, phase_name: str) -> None:
            on_phase(f"{plan}: {phase_name}", 1.0)

    return Monitor()
