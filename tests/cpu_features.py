"""What this CPU can compute in, as OpenVINO says."""

import openvino as ov
import pytest

needs_bfloat16 = pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
    reason="this CPU has no bfloat16 instructions, and OpenVINO refuses to compute in it there",
)
