"""An engine that this machine cannot run: one line that names what is missing, wherever it is
asked for.
"""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mfs_trt.builder.build import build_engine
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import ServerError
from mfs_trt.serving.launcher import TritonServer
from tensorrt_rig import rtx_config
from tiny_folders import folder_family, write_tiny_family

pytestmark = pytest.mark.triton

# Of torch or of the machine; with both, the plans are for another GPU.
MISSING = r"target tensorrt-rtx needs |built for sm\d+, found "


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Real plans for a GPU that is not here, whatever is."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    gpu = "sm120" if here == (8, 6) else "sm86"
    family = write_tiny_family(tmp_path_factory.mktemp("family") / "f", folder_family((1, 2)))
    config = rtx_config(dtype="float16", compute_capabilities=(gpu,))
    return build_engine(family, tmp_path_factory.mktemp("engine") / "e", config)


def test_the_server_says_in_one_line_of_its_log_and_of_its_error_what_is_missing(engine, tmp_path):
    log = tmp_path / "tritonserver.log"
    with pytest.raises(ServerError, match=MISSING) as error:
        TritonServer(engine, log_path=log).start()
    assert "\n" not in str(error.value)
    assert any(re.search(MISSING, line) for line in log.read_text().splitlines())


def test_the_command_line_says_in_one_line_what_is_missing(engine):
    command = [sys.executable, "-m", "mfs_trt", "serve", "--engine", str(engine)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert re.search(MISSING, " ".join((result.stderr + result.stdout).split()))
    assert "Traceback" not in result.stderr + result.stdout


def test_a_target_that_nobody_knows_is_refused_with_those_there_are(engine, tmp_path):
    manifest = replace(EngineManifest.load(engine), target="quantum")
    folder = tmp_path / "engine"
    folder.mkdir()
    manifest.save(folder)
    command = [sys.executable, "-m", "mfs_trt", "generate", "--model", str(folder), "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0 and "quantum" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
