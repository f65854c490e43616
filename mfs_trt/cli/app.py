"""All commands of `mfs-trt` in one application."""

import typer

from mfs_trt.cli.build import build
from mfs_trt.cli.convert import convert
from mfs_trt.cli.eval import evaluate
from mfs_trt.cli.export import export
from mfs_trt.cli.generate import generate
from mfs_trt.cli.inspect import inspect
from mfs_trt.cli.precipitate import precipitate
from mfs_trt.cli.profile import profile
from mfs_trt.cli.quickstart import quickstart
from mfs_trt.cli.serve import serve

app = typer.Typer(
    help="Serve a whole LLM family as one nested model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (convert, inspect, precipitate, profile, export, build, serve, generate, quickstart):
    app.command()(command)
app.command("eval")(evaluate)
