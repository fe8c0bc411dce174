"""New server processes for each test, and executors without a database."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from queue_workflows.executor import launcher_client
from tests.support import executor_app, executors, reused_backends


@pytest.fixture(autouse=True)
def own_server_processes(request: pytest.FixtureRequest) -> Generator[None]:
    """Faults that end or freeze server processes meet new ones, which no earlier test has used."""
    if "own_database" in request.fixturenames:
        request.getfixturevalue("own_database")
    with reused_backends.shared.off():
        yield


@pytest.fixture(scope="module")
def launcher() -> Generator[launcher_client.Launcher]:
    """Forks executors that have loaded `executor_app`."""
    with executors.launched(executor_app.load) as found:
        found.wait_loaded(60)
        yield found


@pytest.fixture
def worker(launcher: launcher_client.Launcher) -> Generator[executors.Worker]:
    """An executor, and the worker's side of its channels."""
    with executors.forked(launcher) as found:
        yield found
