"""What tests of this folder share."""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime, timezone
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.batch_worker import Bodies
    from tests.support.database import Database


@pytest.fixture
def slack_s() -> float:
    """Return less than for tests with processes."""
    return 5.0


@pytest.fixture(autouse=True)
def present(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the `NOW` of a test's module to the present, as a module may be imported long before."""
    if hasattr(request.module, "NOW"):
        now = datetime.now(timezone.utc).replace(microsecond=0)
        monkeypatch.setattr(request.module, "NOW", now)


@pytest.fixture
def bodies(db: ModuleType) -> Generator[Bodies]:
    """The task of `batch_worker`; at the end its handlers are let go."""
    from tests.support.batch_worker import Bodies

    made = Bodies()
    yield made
    made.release.set()


@pytest.fixture(scope="module")
def spare(own_database: Database) -> Generator[str]:
    """Return the DSN of a database that the tests of a file fill one after the other."""
    name = own_database.fresh_name()
    yield own_database.create(name)
    own_database.drop(name)


@pytest.fixture
def own(migrated_database: str, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Return the DSN of a database of this test's own, with the schema, for this process too."""
    yield from _worked_on(migrated_database, monkeypatch)


@pytest.fixture
def empty(fresh_database: str, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Return the DSN of an empty database of this test's own, for this process too."""
    yield from _worked_on(fresh_database, monkeypatch)


def _worked_on(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    yield dsn
    db.close_pool()
