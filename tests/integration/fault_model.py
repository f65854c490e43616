"""A `model.py` for tests: the real worker and engine, which files in a control folder slow down,
steer or break.

`fault` holds a stage name: the stage raises while the file is there (`respond`) or once (others).
`step_delay_s`, `respond_delay_s` hold seconds that every step, every response takes longer.
`hold`: steps wait while it is there; `step` lets one of them through and is taken away by it.
`script` holds a JSON list of token ids: every request gets them in turn, whatever the model says.
Written here: `work` (steps and rows of tokens begun so far), `seen` (the last request, as parsed).
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import triton_python_backend_utils as pb_utils

import mfs_trt.serving.core as core_module
import mfs_trt.serving.dispatcher as dispatcher_module
import mfs_trt.serving.worker as worker_module
from mfs_trt.sampling.sampler import log_prob
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.serving.worker import Worker, start_engine


class TritonPythonModel:
    def initialize(self, args):
        self._control = Path(os.environ["MFS_TEST_CONTROL"])
        self._num_steps = self._num_rows = 0
        self._break(Scheduler, "schedule", "schedule")
        self._break(core_module, "prepare", "prepare")
        self._break(core_module, "decide", "sample")
        self._break(dispatcher_module, "build_outputs", "respond", self._delay_response)
        self._follow_script()
        self._show_requests()
        self._worker = Worker.load(args, pb_utils, self._start_engine)

    def execute(self, requests):
        return self._worker.execute(requests)

    def is_ready(self):
        return self._worker.is_ready()

    def finalize(self):
        self._worker.finalize()

    def _start_engine(self, config):
        load_core = core_module.load_core

        def load_slow_core(folder, **settings):
            core = load_core(folder, **settings)
            self._break(core.engine, "execute", "execute", self._delay)
            return core

        core_module.load_core = load_slow_core
        return start_engine(config)

    def _break(self, owner, attribute, stage, before=lambda *_: None):
        inner = getattr(owner, attribute)

        def wrapper(*args, **kwargs):
            before(*args)
            if self._read("fault") == stage:
                if stage != "respond":
                    (self._control / "fault").unlink(missing_ok=True)
                raise RuntimeError(f"injected at {stage}")
            return inner(*args, **kwargs)

        setattr(owner, attribute, wrapper)

    def _delay(self, step_input):
        self._sleep("step_delay_s")
        while (self._control / "hold").exists():
            step = self._control / "step"
            if step.exists():
                step.unlink(missing_ok=True)
                break
            time.sleep(0.005)
        self._num_steps += 1
        self._num_rows += len(step_input.input_ids)
        self._write("work", json.dumps([self._num_steps, self._num_rows]))

    def _delay_response(self, *_):
        self._sleep("respond_delay_s")

    def _sleep(self, name):
        """The fault itself: an engine, or a client, that is this slow."""
        time.sleep(float(self._read(name) or 0))

    def _follow_script(self):
        inner = core_module.decide

        def decide(output, step_output, requests):
            decisions = inner(output, step_output, requests)
            script = json.loads(self._read("script") or "null")
            if not script:
                return decisions
            for i, decision in enumerate(decisions):
                token_id = script[decision.request.num_output_tokens % len(script)]
                log_probs = (log_prob(decision.logits[0], token_id),) if decision.log_probs else ()
                decisions[i] = replace(decision, token_ids=(token_id,), log_probs=log_probs)
            return decisions

        core_module.decide = decide

    def _show_requests(self):
        inner = worker_module.parse_request

        def parse_request(*args, **kwargs):
            rows = inner(*args, **kwargs)
            shown = [repr((replace(row.prompt, request_id=""), row.options)) for row in rows]
            self._write("seen", json.dumps(shown))
            return rows

        worker_module.parse_request = parse_request

    def _read(self, name):
        """None where the file is not there: the test may take it away at any time."""
        try:
            return (self._control / name).read_text()
        except FileNotFoundError:
            return None

    def _write(self, name, text):
        """At once, so that a reader never sees a part."""
        scratch = self._control / f".{name}"
        scratch.write_text(text)
        scratch.rename(self._control / name)
