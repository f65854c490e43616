"""Build time (wall and CPU) and plan bytes of the TensorRT-RTX target, for GPUs that are not here.

Two families: the one given (SmolLM2-135M: three segments, one head), and random weights in the
shape of Llama-2-13B, cut to three layers, each a tier. One build for each compute capability, and
one for all of them. Usage: python perf/build.py FAMILY [--out FILE]
"""

import argparse
import tempfile
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from report import finish, show

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.family.spec import FamilySpec, TierSpec, load_family
from mfs_trt.model_config import ModelConfig, RopeConfig
from mfs_trt.tensor_names import EMBEDDING
from mfs_trt.weights.writer import TensorEntry, write_family

COMPUTE_CAPABILITIES = ("sm80", "sm86", "sm89", "sm120")
LLAMA_2_13B = ModelConfig(
    architecture="llama",
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    num_layers=3,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=4096,
)


def write_llama_2_13b(folder: Path) -> None:
    """Random float16 weights."""
    tiers = tuple(TierSpec(f"t{i}", i + 1) for i in range(LLAMA_2_13B.num_layers))
    spec = FamilySpec(LLAMA_2_13B, tiers, "", (), "float16")

    def load(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16).uniform_(-0.02, 0.02)

    entries = [
        TensorEntry(name, shape, "float16", partial(load, shape))
        for name, shape in spec.tensor_shapes().items()
    ]
    write_family(folder, LLAMA_2_13B, tiers, "float16", entries)


def weights_nbytes(family: FamilySpec) -> dict[str, int]:
    """Bytes of the float16 weights that each plan must hold."""
    shapes = {name: 2 * prod(shape) for name, shape in family.tensor_shapes().items()}
    nbytes = {}
    for segment in family.segments:
        layers = range(segment.first_layer, segment.last_layer)
        prefixes = tuple(f"layers.{i}." for i in layers)
        own = (n for name, n in shapes.items() if name.startswith(prefixes))
        nbytes[f"segment_{segment.index}"] = sum(own)
    names = dict.fromkeys(family.head_name(tier) for tier in range(len(family.tiers)))
    return nbytes | {f"head_{i}": shapes[name] for i, name in enumerate(names)}


def measure(folder: Path, gpus: tuple[str, ...], memory_nbytes: int) -> dict[str, Any]:
    """Seconds and bytes of each plan of one build."""
    config = BuildConfig(
        target="tensorrt-rtx",
        dtype="float16",
        compute_capabilities=gpus,
        memory_nbytes=memory_nbytes,
    )
    seconds, begin, cpu_begin = {}, time.perf_counter(), time.process_time()

    def on_plan(name: str) -> None:
        seconds[name] = time.perf_counter() - begin - sum(seconds.values())

    with tempfile.TemporaryDirectory() as scratch:
        engine = build_engine(folder, Path(scratch) / "engine", config, on_plan)
        total_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        sizes = {p.name: (engine / f"{p.name}.plan").stat().st_size for p in _plans(engine)}
    plans = {name: {"s": seconds[name], "nbytes": sizes[name]} for name in sizes}
    return {
        "total_s": total_s,
        "cpu_s": cpu_s,
        "plan_nbytes": sum(sizes.values()),
        "plans": plans,
    }


def _plans(engine: Path) -> Any:
    return EngineManifest.load(engine).plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import tensorrt_rtx_bindings

    result: dict[str, Any] = {
        "benchmark": "build",
        "target": f"tensorrt-rtx {tensorrt_rtx_bindings.__version__}",
        "dtype": "float16",
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        write_llama_2_13b(Path(scratch) / "llama")
        cases = {
            load_family(args.family).source: (args.family, 1 << 30),
            "llama-2-13b, 3 layers": (Path(scratch) / "llama", 4 << 30),
        }
        for name, (folder, memory_nbytes) in cases.items():
            family = load_family(folder)
            needed = weights_nbytes(family)
            figures: dict[str, Any] = {
                "hidden_size": family.model.hidden_size,
                "layers": [segment.num_layers for segment in family.segments],
                "embedding_nbytes": 2 * prod(family.tensor_shapes()[EMBEDDING]),
                "weights_nbytes": needed,
            }
            for gpus in (*((gpu,) for gpu in COMPUTE_CAPABILITIES), COMPUTE_CAPABILITIES):
                built = measure(folder, gpus, memory_nbytes)
                figures[" ".join(gpus)] = built
                ratio = built["plan_nbytes"] / sum(needed.values())
                megabytes = built["plan_nbytes"] / 1e6
                times = built["total_s"], built["cpu_s"]
                rows.append((name, " ".join(gpus), *times, megabytes, ratio))
            result[name] = figures
    show("builds", ["family", "for", "s", "CPU s", "MB", "over weights"], rows)
    finish(result, args.out)


if __name__ == "__main__":
    main()
