"""The pytest fixtures. PYTEST_DONT_REWRITE: a host's conftest may have imported this before."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from queue_workflows.testing import app_harness, apps, servers


@pytest.fixture(scope="session")
def workflows_dsn() -> str | None:
    """Override to name the `*_test` database beside which the scratch one is made.

    None: QUEUE_WORKFLOWS_TEST_DB_URL, else the embedded server.
    """
    return None


@pytest.fixture(scope="session")
def workflows_app() -> apps.App:
    """Override to name the host app: `"letters:setup"`, or a function that wires the host in."""
    return None


@pytest.fixture(scope="session")
def workflows_database(workflows_dsn: str | None) -> Generator[str]:
    """The DSN of a scratch database with the schema, dropped when the session ends."""
    with servers.database(workflows_dsn) as dsn:
        yield dsn


@pytest.fixture
def flows(workflows_database: str, workflows_app: apps.App) -> Generator[app_harness.Harness]:
    """A `Harness` of the app on an emptied database; the configuration is restored afterwards."""
    with app_harness.harness(app=workflows_app, dsn=workflows_database, own=True) as made:
        yield made
