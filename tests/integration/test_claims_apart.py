"""A claim that tries row by row obeys what every claim obeys."""

from __future__ import annotations

import pytest

from queue_workflows import config, db, queues, workers
from queue_workflows.claim import row_isolation
from tests.support import factories, rows_before_checks, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")
QUEUE = "load"


def test_the_classes_of_errors_are_the_same_in_sql(conn: db.Connection) -> None:
    letters = "0123456789ABCDFHPQVWXZ"
    states = {first + second for first in letters for second in letters}
    assert states > row_isolation.SYSTEMIC | row_isolation.DATA
    for state in sorted(states):
        row = conn.execute(
            "SELECT queue_workflows_is_systemic(%s) AS systemic,"
            " queue_workflows_is_about_data(%s) AS data",
            (state + "000", state + "000"),
        ).fetchone()
        assert row == {
            "systemic": state in row_isolation.SYSTEMIC,
            "data": state in row_isolation.DATA,
        }


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
