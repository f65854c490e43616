"""TritonServer: one tritonserver process over a temporary model repository, watched until it is
stopped.

`with TritonServer(engine_dir) as server:` starts it, waits until every model is ready and stops it
at the end. A watching thread ends the server when the worker's stub process dies, since Triton
server would let the clients' streams hang for ever.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from mfs_trt.errors import ServerError
from mfs_trt.serving.config import SERVE_CONFIG_NAME, STOPPING_NAME, ServeConfig, write_serve_config
from mfs_trt.serving.installation import STUB_NAME, find_installation
from mfs_trt.serving.triton_spec import MODELS, WORKER

logger = logging.getLogger(__name__)

DEFAULT_PORTS = (8000, 8001, 8002)  # HTTP, gRPC, metrics

_SHM_DIR = Path("/dev/shm")
_TICKET_TRIP_S = 0.2  # many times what a ticket takes through Triton server
_SHM_BYTES = 16 << 20  # of the worker's shared memory at the start; it grows by the same


class TritonServer:
    """A running tritonserver. Ports of 0 are replaced by free ones."""

    def __init__(
        self,
        engine_dir: Path | str,
        *,
        config: ServeConfig | None = None,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        environment: Mapping[str, str] | None = None,
        model_repository: Path | str | None = None,
        repository_out: Path | str | None = None,
        log_path: Path | str | None = None,
        ready_timeout_s: float = 120.0,
        exit_timeout_s: int = 30,
    ):
        """`config`: its `engine` is replaced by `engine_dir`. `environment`: laid over the
        server's, such as OpenMP settings. `model_repository`: templates to use in place of the
        packaged ones. `repository_out`: where to write the repository and leave it, in place of a
        temporary folder. `exit_timeout_s`: how long stopping waits for running requests.
        """
        self.engine_dir = Path(engine_dir).absolute()
        self.host = host
        free = iter(_free_ports(host, (http_port, grpc_port, metrics_port).count(0)))
        self.http_port, self.grpc_port, self.metrics_port = (
            port or next(free) for port in (http_port, grpc_port, metrics_port)
        )
        self._config = replace(config or ServeConfig(engine=""), engine=str(self.engine_dir))
        self._scratch = Path(tempfile.mkdtemp(prefix="mfs-trt-"))
        self.repository = Path(repository_out or self._scratch / "models").absolute()
        self.log_path = Path(log_path or self._scratch / "tritonserver.log").absolute()
        self._keeps_log = log_path is not None
        self._environment = dict(environment or {})
        self._templates = model_repository
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._shm_prefix = f"mfs-trt-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self.stub_pid: int | None = None
        self.failure: str | None = None  # why the server ended by itself

    # -- life --------

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until every model is ready. Raises `ServerError` with the server's own
        reason.
        """
        try:
            installation = find_installation(self._scratch)
            self._write_repository()
            environment = {**installation.environment, **self._environment}
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [str(installation.binary), *self._arguments(installation.backend_dir)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C reaches us only, and we stop it
                )
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self.stub_pid = find_stub(self.pid)
        self._watcher = threading.Thread(target=self._watch, name="mfs-watch", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Let running requests finish, end the server and remove what it left behind."""
        self._is_stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            for version_folder in self.repository.glob("*/1"):
                (version_folder / STOPPING_NAME).touch()
            time.sleep(_TICKET_TRIP_S)  # tickets on their way come back while steps are accepted
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._exit_timeout_s + 10)
        self.kill()

    def kill(self) -> None:
        """End the server at once and remove what it left behind."""
        self._is_stopping.set()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._kill_stub()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for region in _SHM_DIR.glob(self._shm_prefix + "*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the server to end; False when time ran out."""
        assert self._process is not None, "the server was not started"
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def read_metrics(self) -> str:
        """The metrics page; raises `OSError` when it cannot be had."""
        return _get(f"http://{_reachable(self.host)}:{self.metrics_port}/metrics")

    def read_log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    # -- starting --------

    def _write_repository(self) -> None:
        """Copy the model repository and fill in the engine folder."""
        if self._templates is not None:
            _copy_repository(Path(self._templates), self.repository)
        else:
            with resources.as_file(resources.files("mfs_trt.model_repo")) as templates:
                _copy_repository(templates, self.repository)
        for stale in self.repository.glob(f"*/1/{STOPPING_NAME}"):
            stale.unlink()
        write_serve_config(self.repository / WORKER / "1" / SERVE_CONFIG_NAME, self._config)

    def _arguments(self, backend_dir: Path) -> list[str]:
        return [
            f"--model-repository={self.repository}",
            f"--backend-directory={backend_dir}",
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            "--metrics-interval-ms=1000",
            "--strict-readiness=true",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}",
            f"--backend-config=python,shm-growth-byte-size={_SHM_BYTES}",
            f"--backend-config=python,stub-timeout-seconds={int(self._ready_timeout_s)}",
        ]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        url = f"http://{_reachable(self.host)}:{self.http_port}/v2/health/ready"
        while not _answers(url):
            if not self.is_running:
                raise ServerError(
                    f"tritonserver ended while starting: {load_error(self.read_log())}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"tritonserver was not ready within {self._ready_timeout_s:g} s: "
                    f"{load_error(self.read_log())}"
                )
            time.sleep(0.1)

    # -- watching --------

    def _watch(self) -> None:
        """Wait for the end of the server or of the stub; of the stub alone: end the server."""
        while not self._is_stopping.wait(0.2):
            if not self.is_running:
                self.failure = f"tritonserver ended: {load_error(self.read_log())}"
                logger.error(self.failure)
                return
            if self.stub_pid is None or _is_alive(self.stub_pid):
                continue
            if not _answers(f"http://{_reachable(self.host)}:{self.http_port}/v2/health/live"):
                continue  # the server closes its ports first when it is told to end
            self.failure = (
                f"the worker process {self.stub_pid} died; tritonserver is ended so that no "
                "client waits for ever"
            )
            logger.error(self.failure)
            assert self._process is not None
            self._process.kill()
            self._process.wait()
            return

    def _kill_stub(self) -> None:
        """End a stub that outlived its server; another process may have its id by now."""
        if self.stub_pid is not None and _is_stub(self.stub_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.stub_pid, signal.SIGKILL)


def load_error(log: str) -> str:
    """The line of a tritonserver log that says why a model did not load, or its last error line."""
    reasons = re.findall(r"failed to load '\S+' version \d+: (.*)", log)
    if reasons:
        # Triton server adds the Python stack with its line ends escaped.
        reason = reasons[0].split("\\n\\nAt:")[0].strip().strip('"')
        return re.sub(r"^Internal: (TritonModelException: )?", "", reason)
    errors = re.findall(r"^(?:error:|E\d{4} \S+ \d+ \S+\]) *(.*)", log, re.MULTILINE)
    lines = log.strip().splitlines()
    return (errors or lines or ["its log is empty"])[-1].strip()


def find_stub(server_pid: int) -> int | None:
    """Process id of the Python backend's stub below a server; None if there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == server_pid and _is_stub(int(entry.name)):
                return int(entry.name)
    return None


def _is_stub(pid: int) -> bool:
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False
    return Path(os.fsdecode(first)).name == STUB_NAME


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _copy_repository(source: Path, target: Path) -> None:
    for model in MODELS:
        folder = source / model
        shutil.copytree(
            folder, target / model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
        (target / model / "1").mkdir(exist_ok=True)


def _free_ports(host: str, count: int) -> list[int]:
    """Distinct free ports; another process may still take one before the server does."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()


def _answers(url: str) -> bool:
    try:
        _get(url)
    except (OSError, urllib.error.URLError):
        return False
    return True
