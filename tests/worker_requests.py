"""Requests to a worker on stand-ins, and what came back."""

import numpy as np

from fakes import FakeRequest, wait_until
from mfs_trt.serving.config import ServeConfig
from mfs_trt.serving.triton_spec import TICKET

FAST = ServeConfig(engine="e", cancel_poll_s=0.01, ticket_period_s=0.01, metrics_period_s=0.01)
TEXT_OUTPUTS = ("text_output", "finish_reason", "output_log_probs", "num_output_tokens")


def request(text="hi", *, stream=True, request_id="", outputs=None, **fields):
    tensors = {"text_input": np.array([[text.encode()]], dtype=np.object_)}
    tensors["stream"] = np.array([[stream]])
    for name, value in fields.items():
        dtype = {bool: np.bool_, int: np.int32, str: np.object_}[type(value)]
        value = value.encode() if isinstance(value, str) else value
        tensors[name] = np.array([[value]], dtype=dtype)
    return FakeRequest(tensors, request_id=request_id, outputs=outputs)


def send(worker, *args, **fields) -> FakeRequest:
    made = request(*args, **fields)
    worker.execute([made])
    return made


def answer_another(worker, engine) -> None:
    """Another request, from arrival to its last response."""
    sender = send(worker).sender
    engine.emit("x", ends="length")
    sender.finish()


def texts(responses):
    return [r["text_output"].item().decode() for r in responses]


def first_step(worker, **fields):
    made = send(worker, outputs=(TICKET,), **fields)
    wait_until(lambda: made.sender.responses)
    return made.sender


def second_step(worker, first, *, is_client_gone=False):
    made = FakeRequest({TICKET: first.responses[-1][TICKET]}, outputs=TEXT_OUTPUTS)
    made.is_client_gone = is_client_gone
    worker.execute([made])
    return made.sender
