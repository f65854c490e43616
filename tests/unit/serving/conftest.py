"""Engines and workers that run for one test."""

import pytest

from fakes import FakeAsyncEngine, FakePbUtils
from mfs_trt.serving.worker import Worker
from served import Served
from worker_requests import FAST


@pytest.fixture
def serve():
    """A function that starts a `Served`; all are shut down at the end."""
    running: list[Served] = []

    def make(**settings) -> Served:
        running.append(Served(**settings))
        return running[-1]

    yield make
    for served in running:
        served.gate.open()
        served.engine.shutdown()


@pytest.fixture
def engine():
    return FakeAsyncEngine()


@pytest.fixture
def pb_utils():
    return FakePbUtils()


@pytest.fixture
def worker(pb_utils, engine):
    made = Worker(pb_utils, engine, FAST)
    yield made
    made.finalize()
