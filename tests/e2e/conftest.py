"""Servers that several files of this folder speak to."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.commands import Commands
from tests.support.tcp_server import Server, server
from tests.support.terminal import Terminal

if TYPE_CHECKING:
    from tests.support.database import Database
    from tests.support.http_service import Service


@pytest.fixture(scope="module")
def modules_database(own_database: Database) -> Generator[str]:
    """The DSN of a migrated database for processes that serve all tests of a file.

    The database of the fixture `db` is for one test at a time. Host `h` has served `load.a`.
    """
    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO worker_heartbeats (host_label, queue) VALUES ('h', 'load.a')")
    yield dsn
    own_database.drop(name)


@pytest.fixture
def service(cli: Commands) -> Generator[Service]:
    """A running service of the test database, with workers."""
    from tests.support import http_service

    with http_service.served(cli) as made:
        yield made


@pytest.fixture
def terminal() -> Generator[Terminal]:
    """A pseudo terminal for a command."""
    made = Terminal()
    yield made
    made.close()


@pytest.fixture
def code_tasks(invariants_hold: None) -> None:
    """Tasks of `code_app` may be queued from here; the invariants hold at the end."""
    from tests.support import code_app

    code_app.setup()


@pytest.fixture(scope="session")
def reachable() -> Generator[Server]:
    """A server that others reach by TCP and password: databases `fleet_test`, `missing_test`."""
    with server("fleet_test,missing_test") as made:
        yield made
