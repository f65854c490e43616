"""A tiny family with a tokenizer, served by a real tritonserver; and the same engine offline."""

import json
import shutil
from pathlib import Path

import pytest

from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.llm import LLM
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.launcher import TritonServer
from probes import wait_idle
from servers import MixedServer, SlowServer, make_engine, make_family

START_S = 300.0  # for a server to start on a busy machine


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory) -> Path:
    """A family with a byte-level tokenizer and chat template."""
    return make_family(tmp_path_factory.mktemp("family"), "byte_level")


@pytest.fixture(scope="session")
def engine_dir(family_dir, tmp_path_factory) -> Path:
    return make_engine(family_dir, tmp_path_factory.mktemp("engine") / "e", max_model_len=512)


@pytest.fixture(scope="session")
def server(engine_dir):
    with TritonServer(engine_dir, environment=PASSIVE_WAITING, ready_timeout_s=START_S) as running:
        yield running


@pytest.fixture(scope="session")
def llm(engine_dir) -> LLM:
    return LLM(engine_dir)


@pytest.fixture(scope="session")
def offline_text(llm):
    """`(prompt, tier, max_tokens) -> text`: what a lone request gets from the engine, offline."""

    def text(prompt: str, tier: str, max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens)
        return llm.generate(prompt, params, tier=tier)[0].outputs[0].text

    return text


@pytest.fixture(scope="session")
def _slow_server(family_dir, tmp_path_factory):
    with SlowServer(
        family_dir, tmp_path_factory.mktemp("slow"), ready_timeout_s=START_S
    ) as running:
        yield running


@pytest.fixture
def slow_server(_slow_server):
    _slow_server.reset_control()
    wait_idle(_slow_server)  # what the test before left behind would share its steps
    yield _slow_server
    _slow_server.reset_control()


@pytest.fixture(scope="session")
def sentencepiece_llm(tmp_path_factory) -> LLM:
    """The engine of a family with a SentencePiece-style tokenizer, offline."""
    root = tmp_path_factory.mktemp("sentencepiece")
    family = make_family(root, "metaspace_byte_fallback")
    llm = LLM(make_engine(family, root / "engine", max_model_len=512))
    llm.engine_dir = root / "engine"
    return llm


@pytest.fixture(scope="session")
def mixed_server(sentencepiece_llm, tmp_path_factory):
    """`sentencepiece` loads; beside it stand the usual mistakes of a configuration."""
    root = tmp_path_factory.mktemp("mixed")
    corrupt, truncated = root / "corrupt", root / "truncated"
    for folder in (corrupt, truncated):
        shutil.copytree(sentencepiece_llm.engine_dir, folder)
    manifest = json.loads((corrupt / "engine.json").read_text())
    del manifest["block_size"]
    (corrupt / "engine.json").write_text(json.dumps(manifest))
    (truncated / "engine.json").write_text('{"target": "refer')
    serve_json = {
        "sentencepiece": json.dumps({"engine": str(sentencepiece_llm.engine_dir)}),
        "missing_engine": json.dumps({"engine": str(root / "nowhere")}),
        "unfilled": '{"engine": "${engine_dir}"}',
        "bad_json": '{"engine": ',
        "unknown_key": json.dumps({"engine": str(corrupt), "max_batch": 4}),
        "no_serve_json": None,
        "corrupt_engine": json.dumps({"engine": str(corrupt)}),
        "truncated_engine": json.dumps({"engine": str(truncated)}),
    }
    with MixedServer(serve_json, environment=PASSIVE_WAITING, ready_timeout_s=START_S) as running:
        yield running
