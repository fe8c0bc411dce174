"""Start console scripts against the test database."""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType

import pytest

from tests.support import commands
from tests.support.commands import Commands
from tests.support.tcp_server import Server, server


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts commands whose DSN is the test database; none outlives the test."""
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield made


@pytest.fixture(scope="session")
def reachable() -> Generator[Server]:
    """A server that others reach by TCP and password: databases `fleet_test`, `missing_test`."""
    with server("fleet_test,missing_test") as made:
        yield made
