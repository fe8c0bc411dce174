"""The stream of changes: after an error, and behind many others."""

from __future__ import annotations

from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, history, jobs
from tests.support.asgi_service import streamed


@pytest.fixture(autouse=True)
def _queues(db: Any) -> None:
    queue_workflows.configure(ingest_queues={"load.a", "load.b"})
    queue_workflows.register_ingest_task("load", lambda args: None)


def enqueue(queue: str = "load.a") -> str:
    return jobs.enqueue_once("load", queue=queue, by="a test")[0]


def place(ago_s: float = 0.0) -> str:
    return f"{int((history.now().timestamp() - ago_s) * 1_000_000)}-i1"


def test_an_error_of_the_database_loses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    states, failed = history.run_states, []
    begun: list[bool] = []

    def once(*args: Any, **keywords: Any) -> Any:
        if begun and not failed:
            failed.append(True)
            raise db.OperationalError("the server was restarted")
        return states(*args, **keywords)

    def opened() -> None:
        begun.append(True)  # before the change, which the stream may read at once
        found.append(enqueue())

    monkeypatch.setattr(history, "run_states", once)
    status, text = streamed(
        opened=opened,
        until=lambda text: bool(found) and found[0] in text,
    )
    assert (status, found[0] in text, failed) == (200, True, [True])


def test_changes_of_others_do_not_put_a_reader_too_far_behind(db: Any, conn: db.Connection) -> None:
    last = place()
    mine = enqueue("load.b")
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, queue)"
        " SELECT 'other', 'note', 'load.a' FROM generate_series(1, %s)",
        (4000,),
    )
    status, text = streamed(f"job_id={mine}", last=last, until=lambda text: mine in text)
    assert (status, mine in text, "other" in text) == (200, True, False)


def test_a_run_that_was_submitted_meanwhile_is_replayed(db: Any, conn: db.Connection) -> None:
    last = place()
    conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('new', 'any')")
    status, text = streamed("kind=run", last=last, until=lambda text: '"new"' in text)
    assert (status, '"new"' in text) == (200, True)
