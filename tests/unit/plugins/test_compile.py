"""Every kernel compiles ahead of time for every target, and nothing spills on the decode path."""

import json
import os
import subprocess
import sys

import pytest

from mfs_trt.plugins.compile import TARGETS, compile_kernel, without_scratch_parameters
from mfs_trt.plugins.triton_kernels.shapes import compiled_shapes


def compile_all(*targets: int) -> list[dict]:
    """The program's own table; in a process of its own, since kernels are interpreted in this."""
    command = [sys.executable, "-m", "mfs_trt.plugins.compile", "--json", "--targets"]
    result = subprocess.run(
        [*command, *map(str, targets)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def table(request) -> list[dict]:
    """Printed past pytest's capture: what the kernels use belongs into every run's log."""
    rows = compile_all(*TARGETS)
    assert {row["target"] for row in rows} == set(TARGETS)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\nkernel, target: registers, shared bytes, stack bytes (spills)")
        for row in rows:
            figures = (row["registers"], row["shared_nbytes"], row["stack_nbytes"])
            print(f"{row['kernel']} sm_{row['target']}:", *figures)
    return rows


def test_every_kernel_compiles_for_every_target(table):
    targets = {row["target"] for row in table}
    compiled = {(row["kernel"], row["target"]) for row in table}
    assert compiled == {(name, target) for name in compiled_shapes() for target in targets}


def test_nothing_spills_on_the_decode_path(table):
    decode = [row for row in table if "decode" in row["kernel"]]
    assert decode
    assert [row for row in decode if row["stack_nbytes"]] == []


def test_registers_and_shared_memory_are_read_back(table):
    assert all(16 <= row["registers"] <= 255 for row in table)
    # The smallest GPUs allow 99 KiB a block; attention holds at least a tile of keys and values.
    attention = [row for row in table if row["kernel"].startswith("paged_attention")]
    assert all(2 * 32 * 64 * 2 <= row["shared_nbytes"] <= 99 << 10 for row in attention)


PTX = """.visible .entry add(
\t.param .u64 .ptr .global .align 1 add_param_0,
\t.param .u32 add_param_1,
\t.param .u64 .ptr .global .align 1 add_param_2,
\t.param .u64 .ptr .global .align 1 add_param_3
)
{
\tld.param.b64 %rd1, [add_param_0];
}
"""


def test_scratch_parameters_are_taken_off_the_entry_point():
    trimmed = without_scratch_parameters(PTX, 2)
    assert "add_param_1\n)" in trimmed
    assert "add_param_2" not in trimmed and "add_param_3" not in trimmed


def test_a_scratch_parameter_in_use_is_not_taken_off():
    used = PTX.replace("[add_param_0]", "[add_param_3]")
    with pytest.raises(AssertionError, match="add_param_3"):
        without_scratch_parameters(used, 2)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted")
def test_interpreted_kernels_are_refused_by_name_of_the_setting():
    spec = next(iter(compiled_shapes().values()))
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_kernel(spec, 80)
