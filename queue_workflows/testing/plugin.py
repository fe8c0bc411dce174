"""Define the pytest fixtures for the tests of an app.

PYTEST_DONT_REWRITE: an app may have imported this before pytest loads it.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from queue_workflows.testing import app_harness, apps, servers


@pytest.fixture(scope="session")
def workflows_dsn() -> str | None:
    """Name the `*_test` database next to which the scratch one is created; override it.

    None stands for QUEUE_WORKFLOWS_TEST_DB_URL, else the embedded server.
    """
    return None


@pytest.fixture(scope="session")
def workflows_app() -> apps.App:
    """Name the app: `"letters:setup"`, or a function that configures it; override it."""
    return None


@pytest.fixture(scope="session")
def workflows_database(workflows_dsn: str | None) -> Generator[str]:
    """Yield the DSN of a scratch database with the schema; it is dropped at the session's end."""
    with servers.database(workflows_dsn) as dsn:
        yield dsn


@pytest.fixture
def flows(workflows_database: str, workflows_app: apps.App) -> Generator[app_harness.Harness]:
    """Yield a `Harness` of the app on an emptied database; restore the configuration afterwards."""
    with app_harness.harness(app=workflows_app, dsn=workflows_database, own=True) as made:
        yield made
