"""Handlers in executors use the app's connections: each process its own, nothing inherited."""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any

from queue_workflows import tasks
from tests.support import executors


def backend(reason: str) -> dict[str, Any]:
    """The server process behind the pool of this process."""
    from queue_workflows import db

    with db.connection() as conn:
        row = conn.execute("SELECT pg_backend_pid() AS backend").fetchone()
    assert row is not None
    return {"backend": row["backend"], "pid": os.getpid()}


def load() -> None:
    """Use the database while the app is loaded, as some apps do."""
    os.environ["BACKEND_OF_THE_LAUNCHER"] = str(backend("load")["backend"])
    tasks.register_ingest_task("backend", backend, queue="load")


def test_each_executor_opens_a_pool_of_its_own(db: ModuleType) -> None:
    with db.connection() as conn:
        own = conn.execute("SELECT pg_backend_pid() AS backend").fetchone()["backend"]
    with executors.launched(load, alone=False) as launcher:
        launchers = int(launcher.registered.environment["BACKEND_OF_THE_LAUNCHER"] or 0)
        with executors.forked(launcher) as first, executors.forked(launcher) as second:
            seen = [json.loads(each.task("backend").result) for each in (first, second, first)]
    backends = [each["backend"] for each in seen]
    assert backends[0] == backends[2]
    assert len({own, launchers, *backends[:2]}) == 4
    with db.connection() as conn:
        assert conn.execute("SELECT pg_backend_pid() AS b").fetchone()["b"] == own
