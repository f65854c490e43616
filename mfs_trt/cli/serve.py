"""`mfs-trt serve`: engine or family folder → a running tritonserver with a live line."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mfs_trt.builder.cache import resolve_engine
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.engine.threads import PASSIVE_WAITING
from mfs_trt.scheduler.tier_policy import EXPLICIT
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.launcher import TritonServer
from mfs_trt.serving.live import watch

console = Console()


def serve(
    engine: Annotated[
        Path,
        typer.Option(help="An engine folder, or a family folder (built first, in a cache)."),
    ],
    http_port: Annotated[int, typer.Option(help="0: a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0: a free one.")] = 8002,
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no access control.")
    ] = "127.0.0.1",
    max_queue_size: Annotated[int, typer.Option(help="Requests that may wait.")] = 1024,
    tier_policy: Annotated[
        str, typer.Option(help="Of requests that name neither a policy nor a tier.")
    ] = EXPLICIT,
    model_repository_out: Annotated[
        Path | None, typer.Option(help="Write the model repository here, and leave it there.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write tritonserver's log here, and leave it there.")
    ] = None,
    ready_timeout_s: Annotated[float, typer.Option(help="How long loading may take.")] = 300.0,
    exit_timeout_s: Annotated[
        int, typer.Option(help="How long stopping waits for running requests.")
    ] = 30,
) -> None:
    """Serve ENGINE with Triton server until SIGINT or SIGTERM."""
    # SIGTERM while starting, too: the context below then ends what was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine_dir = resolve_engine(engine)
    server = TritonServer(
        engine_dir,
        config=ServeConfig(engine="", max_queue_size=max_queue_size, tier_policy=tier_policy),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        environment=PASSIVE_WAITING,
        repository_out=model_repository_out,
        log_path=log,
        ready_timeout_s=ready_timeout_s,
        exit_timeout_s=exit_timeout_s,
    )
    try:
        with server:
            _print_banner(server)
            watch(server, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return
    text = server.failure or "tritonserver ended"
    console.print(text, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


def _print_banner(server: TritonServer) -> None:
    family = EngineManifest.load(server.engine_dir).load_family()
    tiers = ", ".join(f"{tier.name} ({tier.exit_layer} layers)" for tier in family.tiers)
    url = f"http://{server.host}:{server.http_port}"
    body = '{"text_input": "Gravity is", "max_tokens": 20, "stream": true}'
    console.print(f"ready: HTTP {url}  gRPC {server.host}:{server.grpc_port}", highlight=False)
    console.print(f"metrics: http://{server.host}:{server.metrics_port}/metrics", highlight=False)
    console.print("models: ensemble, tensorrt_llm, tensorrt_llm_bls, family", highlight=False)
    console.print(f"tiers: {tiers}", highlight=False)
    console.print(
        f"try: curl -N {url}/v2/models/ensemble/generate_stream -d '{body}'",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
