"""Engines that run for one test."""

import pytest

from served import Served


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
