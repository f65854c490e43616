"""`mfs-trt precipitate` as a process: killed and resumed, and as two processes against one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mfs_trt.weights.store import WeightStore
from probes import wait_until
from trainings import write_texts, write_trainable_family

SETTINGS = (
    "--seq-length 32 --batch-size 4 --micro-batch-size 2 --learning-rate 1e-2 --autocast float32"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return write_trainable_family(folder / "family"), write_texts(folder / "texts.jsonl")


def _command(sources: tuple[Path, Path], out: Path, *arguments: str) -> list[str]:
    family, data = map(str, sources)
    command = ["-m", "mfs_trt", "precipitate", family, "--data", data, "--out", str(out)]
    return [*command, *SETTINGS.split(), *arguments]


def _run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def _losses(out: Path) -> dict[int, dict[str, float]]:
    lines = (out.with_name(out.name + ".training") / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    return {r["step"]: r["losses"] for r in reports}  # the later line of a repeated step


def _weights(out: Path) -> dict[str, torch.Tensor]:
    store = WeightStore(out)
    return {name: store.get(name) for name in store.names()}


def test_a_killed_training_resumes_with_bit_equal_losses_and_weights(sources, tmp_path):
    arguments = "--steps", "150", "--checkpoint-every", "5"
    _run([sys.executable, *_command(sources, tmp_path / "whole", *arguments)])
    cut = tmp_path / "cut"
    child = subprocess.Popen(
        [sys.executable, *_command(sources, cut, *arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    work = tmp_path / "cut.training"
    wait_until((work / "step-5").exists, timeout_s=120)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not cut.exists()
    _run([sys.executable, *_command(sources, cut, *arguments)])
    assert str(_losses(cut)) == str(_losses(tmp_path / "whole"))
    wanted = _weights(tmp_path / "whole")
    assert all(torch.equal(t, wanted[name]) for name, t in _weights(cut).items())


@pytest.mark.parametrize("mode", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_two_processes_train_what_one_trains(sources, tmp_path, mode):
    arguments = "--steps", "6", "--schedule", "stepwise", *mode
    one, two = tmp_path / "one", tmp_path / "two"
    _run([sys.executable, *_command(sources, one, *arguments)])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    _run([*torchrun, "--master-port", "29517", *_command(sources, two, *arguments)])
    a, b = _losses(one), _losses(two)
    assert a.keys() == b.keys() == set(range(1, 7))
    for step in a:
        assert list(a[step].values()) == pytest.approx(
            list(b[step].values()), rel=1e-4, nan_ok=True
        )
    wanted = _weights(one)
    for name, tensor in _weights(two).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-2, atol=1e-3)


def test_lora_trains_adapters_and_writes_them_merged(sources, tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "lora"
    _run([sys.executable, *_command(sources, out, "--steps", "4", "--trains", "lora")])
    before, after = _weights(sources[0]), _weights(out)
    assert before.keys() == after.keys()
    name = "layers.0.mlp.up_proj.weight"
    change = after[name] - before[name]
    assert 0 < torch.linalg.matrix_rank(change, rtol=1e-4) <= 16
    assert torch.equal(after["embed_tokens.weight"], before["embed_tokens.weight"])


def test_bad_settings_and_data_are_one_line_errors(sources, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for arguments, message in (
        (["--schedule", "backwards"], "schedule: expected stepwise, joint, got 'backwards'"),
        (["--seq-length", "4096"], "seq_length: expected at most"),
        (["--data", str(empty)], "empty.jsonl"),
        (["--tiers", "a=9"], "expected exits up to layer 4, got 9"),
    ):
        done = subprocess.run(
            [sys.executable, *_command(sources, tmp_path / "out", *arguments)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and message in done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
