"""The worker model: hands what Triton server calls to `mfs_trt.serving.worker`; no logic of its
own.
"""

import triton_python_backend_utils as pb_utils

from mfs_trt.serving.worker import Worker


class TritonPythonModel:
    def initialize(self, args):
        self._worker = Worker.load(args, pb_utils)

    def execute(self, requests):
        return self._worker.execute(requests)

    def is_ready(self):
        return self._worker.is_ready()

    def finalize(self):
        self._worker.finalize()
