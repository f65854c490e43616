"""Tiny families and engines, and servers that tests can slow down, hold, steer and misconfigure."""

import json
import re
import shutil
import time
from pathlib import Path

from hf_models import make_hf_folder
from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.llm import LLM
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.launcher import TritonServer, load_error
from mfs_trt.weights.convert import convert_checkpoint
from probes import get_status, num_active, num_running, settle, wait_until
from tiny_tokenizers import build_tokenizer

MODEL_REPO = Path(__file__).parents[1] / "model_repo"
FAULT_MODEL = Path(__file__).parent / "integration" / "fault_model.py"


def make_family(root: Path, tokenizer_kind: str) -> Path:
    """Three tiers (2, 4, 6 layers) of a random LLaMA, whose Hugging Face folder is `root/hf`."""
    hf = root / "hf"
    tokenizer = build_tokenizer(tokenizer_kind, root / "tokenizer")
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
    config = BuildConfig(
        target="reference", memory_nbytes=memory, block_size=8, limits=EngineLimits(**limits)
    )
    return build_engine(family_dir, out, config)


class SlowServer(TritonServer):
    """A server whose worker obeys the files of `control`: see `fault_model.py`."""

    max_num_seqs, max_queue_size = 8, 60
    max_num_batched_tokens = 64  # longer prompts are computed in chunks
    block_size, num_frames = 8, 180  # the longest request would need 187
    # A frame takes 3072 bytes, and so do the features of a block at both boundaries; three frames
    # hold a block, and the first block of features is not used.
    memory_nbytes = (num_frames + num_frames // 3 + 1) * 3072

    def __init__(self, family_dir: Path, root: Path, **options) -> None:
        self.control = root / "control"
        self.control.mkdir()
        engine = make_engine(
            family_dir,
            root / "engine",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=512,
            memory_nbytes=self.memory_nbytes,
        )
        self.offline = LLM(engine)
        shutil.copytree(MODEL_REPO, root / "models")
        shutil.copy(FAULT_MODEL, root / "models" / "family" / "1" / "model.py")
        super().__init__(
            engine,
            config=ServeConfig(engine="", max_queue_size=self.max_queue_size, metrics_period_s=0.1),
            model_repository=root / "models",
            environment={**PASSIVE_WAITING, "MFS_TEST_CONTROL": str(self.control)},
            **options,
        )

    def reset_control(self) -> None:
        """Normal speed, no faults; a hundredth of a second keeps requests alive for a while."""
        for file in self.control.iterdir():
            if file.name != "work" and not file.name.startswith("."):  # those being written
                file.unlink(missing_ok=True)
        self.set("step_delay_s", "0.01")

    def set(self, name: str, value: object = "") -> None:
        """Write a control file, at once; a value that is no text as JSON."""
        scratch = self.control.parent / "scratch"
        scratch.write_text(value if isinstance(value, str) else json.dumps(value))
        scratch.rename(self.control / name)

    def clear(self, name: str) -> None:
        (self.control / name).unlink(missing_ok=True)

    def step(self, count: int = 1) -> None:
        """While `hold` is set: let steps through, one by one, until each has begun."""
        for _ in range(count):
            num_steps = self.work()[0]
            self.set("step")
            end = time.monotonic() + 60
            while self.work()[0] == num_steps:
                assert time.monotonic() < end, "no step came"
                time.sleep(0.002)

    def let_in(self, count: int) -> None:
        """While `hold` is set: wait for all of `count` requests, then let steps through until as
        many of them run as there are seats.
        """
        wait_until(lambda: num_active(self) == count)
        while num_running(self) < min(count, self.max_num_seqs):
            self.step()
            settle(self)

    def step_until(self, condition) -> None:
        """While `hold` is set: let steps through until the condition is true."""
        while not condition():
            self.step()

    def work(self) -> tuple[int, int]:
        """Steps begun so far, and rows of tokens in them."""
        file = self.control / "work"
        return tuple(json.loads(file.read_text())) if file.exists() else (0, 0)

    def seen(self) -> list[str]:
        """The rows of the last request that was parsed: `PromptRequest` and `ResponseOptions`."""
        return json.loads((self.control / "seen").read_text())

    def expected_frames(self, fields: dict) -> tuple[int, int]:
        """Frames that a request needs at its largest, and frames of the arena."""
        num_prompt_tokens = len(self.offline.tokenizer.encode(fields["text_input"]))
        tokens = num_prompt_tokens + fields["max_tokens"] - 1  # the last one is never computed
        num_segments = self.offline.family.tier_index(fields["tier"]) + 1
        num_blocks = -(-tokens // self.block_size)
        return num_blocks * num_segments, self.num_frames - 1


class MixedServer(TritonServer):
    """Several worker models in one repository; those that cannot load must not keep the others out.

    `serve_json` maps a model's name to the text of its `serve.json`, None to leave that out.
    """

    def __init__(self, serve_json: dict[str, str | None], **options) -> None:
        self.serve_json = serve_json
        super().__init__("", **options)

    def _write_repository(self) -> None:
        config = (MODEL_REPO / "family" / "config.pbtxt").read_text()
        for name, text in self.serve_json.items():
            folder = self.repository / name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(
                config.replace('name: "family"', f'name: "{name}"')
            )
            shutil.copy(MODEL_REPO / "family" / "1" / "model.py", folder / "1")
            if text is not None:
                (folder / "1" / "serve.json").write_text(text)

    def _arguments(self, backend_dir: Path) -> list[str]:
        return [
            *super()._arguments(backend_dir),
            "--exit-on-error=false",
            "--strict-readiness=false",
        ]

    def is_model_ready(self, name: str) -> bool:
        return get_status(self, f"models/{name}/ready") == 200

    def load_errors(self) -> dict[str, str]:
        """Each model that did not load, with the reason in the server's log."""
        pattern = re.compile(r"failed to load '(\S+)' version \d+: ")
        lines = self.read_log().splitlines()
        return {found[1]: load_error(line) for line in lines if (found := pattern.search(line))}
