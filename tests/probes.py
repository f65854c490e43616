"""What a running server shows of itself: HTTP answers, metrics, memory, threads."""

import json
import math
import socket
import struct
import time
import urllib.error
import urllib.request
from pathlib import Path


def wait_until(condition, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


# -- HTTP ----------------------------------------------------------------------------------------


def post(server, path: str, body: dict | bytes) -> tuple[int, str]:
    """Status and body of a POST to `/v2/models/{path}`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server, **body) -> dict:
    """The answer of `ensemble/generate`: one JSON document."""
    status, text = post(server, "ensemble/generate", body)
    assert status == 200, text
    return json.loads(text)


def generate_stream(server, **body) -> list[dict]:
    """The events of `ensemble/generate_stream`."""
    status, text = post(server, "ensemble/generate_stream", body)
    assert status == 200, text
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class HttpStream:
    """A `generate_stream` request over a plain socket, whose reader can stop or go away."""

    def __init__(self, server, receive_nbytes: int | None = None, **body) -> None:
        data = json.dumps({"stream": True, **body}).encode()
        self._socket = socket.socket()
        if receive_nbytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        self._socket.settimeout(60)
        self._socket.connect(("127.0.0.1", server.http_port))
        head = (
            "POST /v2/models/ensemble/generate_stream HTTP/1.1\r\n"
            f"Host: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)

    def wait_first(self) -> "HttpStream":
        received = b""
        while b"data: " not in received:
            more = self._socket.recv(4096)
            assert more, f"the server closed the connection after {received!r}"
            received += more
        return self

    def disconnect(self) -> None:
        """Go away without a farewell: the connection is reset."""
        linger = struct.pack("ii", 1, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()


# -- state ---------------------------------------------------------------------------------------


def get_status(server, path: str) -> int:
    """Status of a GET of `/v2/{path}`."""
    url = f"http://127.0.0.1:{server.http_port}/v2/{path}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def is_ready(server) -> bool:
    return get_status(server, "health/ready") == 200


def metric(server, name: str, **labels) -> float:
    """The sum of a metric's rows that have these labels, and maybe more; nan: none published."""
    rows = [
        float(line.rsplit(" ", 1)[1])
        for line in server.read_metrics().splitlines()
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    return sum(rows) if rows else float("nan")


def settle(server) -> None:
    """Wait for figures that were published after this call: older ones may tell of what was."""
    asked_s = time.time()
    wait_until(
        lambda: metric(server, "nv_trt_llm_general_metrics", general_type="timestamp") > asked_s
    )


def wait_idle(server) -> None:
    """Until nothing waits or runs, by figures of now: of the test before as well."""
    settle(server)
    wait_until(lambda: num_active(server) == 0)


def total(server, name: str, **labels) -> float:
    """A counter by figures of now; 0 where it has not been published."""
    settle(server)
    value = metric(server, name, **labels)
    return 0.0 if math.isnan(value) else value


def num_failed(server) -> float:
    """Requests that ended with an error so far."""
    return total(server, "mfs_requests_failed_total")


def used_frames(server) -> float:
    return metric(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")


def num_waiting(server) -> float:
    return metric(server, "nv_trt_llm_request_metrics", request_type="waiting")


def num_running(server) -> float:
    return metric(server, "nv_trt_llm_request_metrics", request_type="scheduled")


def num_active(server) -> float:
    """Requests that run or wait."""
    return metric(server, "nv_trt_llm_request_metrics", request_type="active")


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def resident_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def shared_nbytes(server) -> int:
    """Shared memory that the server's Python backend holds."""
    regions = Path("/dev/shm").glob(server._shm_prefix + "*")
    return sum(region.stat().st_blocks * 512 for region in regions)
