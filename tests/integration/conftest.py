"""A tiny family with a tokenizer, served by a real tritonserver; and the same engine offline."""

import shutil
from pathlib import Path

import pytest
from hf_models import make_hf_folder
from tiny_tokenizers import build_tokenizer

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.llm import LLM
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.launcher import TritonServer
from mfs_trt.weights.convert import convert_checkpoint

MODEL_REPO = Path(__file__).parents[2] / "model_repo"
FAULT_MODEL = Path(__file__).parent / "fault_model.py"


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory) -> Path:
    """Three tiers (2, 4, 6 layers) of a random LLaMA with a byte-level tokenizer and chat template."""
    root = tmp_path_factory.mktemp("family")
    hf = root / "hf"
    tokenizer = build_tokenizer("byte_level", root / "tokenizer")
    make_hf_folder(
        hf, "llama", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.end_token_ids[0]
    )
    for file in (root / "tokenizer").iterdir():
        shutil.copy(file, hf / file.name)
    reader = open_checkpoint(hf)
    convert_checkpoint(reader, parse_tiers("3", 6), root / "family")
    return root / "family"


def make_engine(family_dir: Path, out: Path, **limits) -> Path:
    memory = limits.pop("memory_nbytes", 64 << 20)
    config = BuildConfig(memory_nbytes=memory, block_size=8, limits=EngineLimits(**limits))
    return build_engine(family_dir, out, config)


@pytest.fixture(scope="session")
def engine_dir(family_dir, tmp_path_factory) -> Path:
    return make_engine(family_dir, tmp_path_factory.mktemp("engine") / "e", max_model_len=512)


@pytest.fixture(scope="session")
def server(engine_dir):
    with TritonServer(engine_dir, environment=PASSIVE_WAITING) as running:
        yield running


@pytest.fixture(scope="session")
def llm(engine_dir) -> LLM:
    return LLM(engine_dir)


@pytest.fixture(scope="session")
def offline_text(llm):
    """`(prompt, tier, max_tokens) -> text`: what a lone request gets from the same engine, offline."""

    def text(prompt: str, tier: str, max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens)
        return llm.generate(prompt, params, tier=tier)[0].outputs[0].text

    return text


class SlowServer(TritonServer):
    """A server whose worker obeys the files of `control`: see `fault_model.py`."""

    max_num_seqs, max_queue_size = 8, 60
    block_size, num_frames = 8, 180  # of 3072 bytes; the longest request would need 187

    def __init__(self, family_dir: Path, root: Path, **options) -> None:
        self.control = root / "control"
        self.control.mkdir()
        engine = make_engine(
            family_dir,
            root / "engine",
            max_num_seqs=self.max_num_seqs,
            max_model_len=512,
            memory_nbytes=self.num_frames * 3072,
        )
        self.offline = LLM(engine)
        shutil.copytree(MODEL_REPO, root / "models")
        shutil.copy(FAULT_MODEL, root / "models" / "family" / "1" / "model.py")
        super().__init__(
            engine,
            config=ServeConfig(engine="", max_queue_size=self.max_queue_size),
            model_repository=root / "models",
            environment={**PASSIVE_WAITING, "MFS_TEST_CONTROL": str(self.control)},
            **options,
        )

    def reset_control(self) -> None:
        """Normal speed, no faults; a thousandth of a second keeps requests alive for a while."""
        for file in self.control.iterdir():
            file.unlink()
        (self.control / "step_delay_s").write_text("0.01")

    def expected_frames(self, fields: dict) -> tuple[int, int]:
        """Frames that a request needs at its largest, and frames of the arena."""
        num_prompt_tokens = len(self.offline.tokenizer.encode(fields["text_input"]))
        tokens = num_prompt_tokens + fields["max_tokens"] - 1  # the last one is never computed
        num_segments = self.offline.family.tier_index(fields["tier"]) + 1
        num_blocks = -(-tokens // self.block_size)
        return num_blocks * num_segments, self.num_frames - 1


@pytest.fixture(scope="session")
def _slow_server(family_dir, tmp_path_factory):
    with SlowServer(family_dir, tmp_path_factory.mktemp("slow")) as running:
        yield running


@pytest.fixture
def slow_server(_slow_server):
    _slow_server.reset_control()
    yield _slow_server
    _slow_server.reset_control()
