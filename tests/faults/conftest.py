"""New server processes for each test, and executors without a database."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import executor_app, executors, reused_backends

if TYPE_CHECKING:
    from tests.support.local_queue_processes import Journal


@pytest.fixture(autouse=True)
def own_server_processes(request: pytest.FixtureRequest) -> Generator[None]:
    """Faults that end or freeze server processes meet new ones, which no earlier test has used."""
    if "own_database" in request.fixturenames:
        request.getfixturevalue("own_database")
    with reused_backends.shared.off():
        yield


@pytest.fixture(scope="module")
def launcher() -> Generator[executors.Launched]:
    """Forks executors that have loaded `executor_app`."""
    with executors.launched(executor_app.load) as found:
        yield found


@pytest.fixture
def worker(launcher: executors.Launched) -> Generator[executors.Worker]:
    """An executor, and the worker's side of its channels."""
    with executors.forked(launcher) as found:
        yield found


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """What the jobs of processes that serve a local queue note of themselves."""
    from tests.support.local_queue_processes import Journal

    return Journal(tmp_path)
