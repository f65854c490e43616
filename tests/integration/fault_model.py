"""A `model.py` for tests: the real worker and engine, which files in a control folder slow down or break.

`fault` holds a stage name: the stage raises while the file is there (`respond`) or once (all others).
`step_delay_s` holds seconds that every step takes longer. `hold`: steps wait while it is there.
"""

import os
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

import mfs_trt.serving.core as core_module
import mfs_trt.serving.dispatcher as dispatcher_module
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.serving.worker import Worker, start_engine


class TritonPythonModel:
    def initialize(self, args):
        self._control = Path(os.environ["MFS_TEST_CONTROL"])
        self._break(Scheduler, "schedule", "schedule")
        self._break(core_module, "prepare", "prepare")
        self._break(core_module, "sample_rows", "sample")
        self._break(dispatcher_module, "build_outputs", "respond")
        self._worker = Worker.load(args, pb_utils, self._start_engine)

    def execute(self, requests):
        return self._worker.execute(requests)

    def is_ready(self):
        return self._worker.is_ready()

    def finalize(self):
        self._worker.finalize()

    def _start_engine(self, config):
        load_core = core_module.load_core

        def load_slow_core(folder):
            core = load_core(folder)
            self._break(core.engine, "execute", "execute", self._delay)
            return core

        core_module.load_core = load_slow_core
        return start_engine(config)

    def _break(self, owner, attribute, stage, before=lambda: None):
        inner = getattr(owner, attribute)

        def wrapper(*args, **kwargs):
            before()
            fault = self._control / "fault"
            if fault.exists() and fault.read_text() == stage:
                if stage != "respond":
                    fault.unlink()
                raise RuntimeError(f"injected at {stage}")
            return inner(*args, **kwargs)

        setattr(owner, attribute, wrapper)

    def _delay(self):
        delay = self._control / "step_delay_s"
        if delay.exists():
            time.sleep(float(delay.read_text()))
        while (self._control / "hold").exists():
            time.sleep(0.005)
