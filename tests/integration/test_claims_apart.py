"""A claim that tries row by row obeys what every claim obeys."""

from __future__ import annotations

import pytest

from queue_workflows import config, db, ingest_executor, node_queue, queues, workers
from tests.support import factories, rows_before_checks, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")
QUEUE = "load"


def test_limits_lock_keys_pauses_and_off_hold_there_too(conn: db.Connection) -> None:
    config.configure(ingest_queues={QUEUE})
    rows_before_checks.put(
        conn, "ingest_jobs", task_name="'t'", queue=f"'{QUEUE}'", priority="1",
        claim_no="9223372036854775807",
    )  # fmt: skip
    for number in range(2):
        factories.ingest(conn, id=f"k{number}", queue=QUEUE, lock_key="k", priority=2)
    factories.ingest(conn, id="free", queue=QUEUE, priority=3)
    who = transitions.who(QUEUE)

    def claimed() -> str | None:
        return transitions.claim_apart(conn, who)

    workers.disable("box", QUEUE)
    assert claimed() is None
    workers.enable("box", QUEUE)
    queues.pause(QUEUE)
    assert claimed() is None
    queues.resume(QUEUE)
    assert [claimed(), claimed(), claimed()] == ["k0", "free", None]
    queues.limit(QUEUE, max_running=2)
    factories.ingest(conn, queue=QUEUE)
    assert claimed() is None
    queues.limit(QUEUE, max_running=3)
    assert claimed() is not None


def test_a_queued_job_that_an_app_executes_obeys_the_limits_of_its_queue(
    conn: db.Connection,
) -> None:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("t", lambda reason: {})
    queues.limit(QUEUE, max_running=1)
    for name in ("runs", "waits"):
        factories.ingest(conn, id=name, queue=QUEUE, task_name="t")
    (running,) = transitions.claim(conn, transitions.who(QUEUE))
    waits = node_queue.get_ingest_job("waits")
    assert waits is not None
    assert ingest_executor.execute_ingest_job(waits) == "skipped"
    transitions.complete_ingest(conn, running)
    assert ingest_executor.execute_ingest_job(waits) == "completed"
