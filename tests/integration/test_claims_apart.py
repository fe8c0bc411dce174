"""A claim that tries row by row obeys what every claim obeys; a renewal skips a bad row."""

from __future__ import annotations

import pytest

from queue_workflows import config, db, queues, workers
from queue_workflows.engine import claim_isolation, job_tables
from queue_workflows.worker import claim_writes, claims_in_flight, guards
from tests.support import app_triggers, factories, rows_before_checks, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")
QUEUE = "load"


def test_the_classes_of_errors_are_the_same_in_sql(conn: db.Connection) -> None:
    letters = "0123456789ABCDFHPQVWXZ"
    states = {first + second for first in letters for second in letters}
    assert states > claim_isolation.SYSTEMIC | claim_isolation.DATA
    for state in sorted(states):
        row = conn.execute(
            "SELECT queue_workflows_is_systemic(%s) AS systemic,"
            " queue_workflows_is_about_data(%s) AS data",
            (state + "000", state + "000"),
        ).fetchone()
        assert row == {
            "systemic": state in claim_isolation.SYSTEMIC,
            "data": state in claim_isolation.DATA,
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
        return transitions.claim_apart(conn, who, promote=False)

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


def test_a_renewal_that_one_row_refuses_renews_the_others(conn: db.Connection) -> None:
    config.configure(ingest_queues={QUEUE})
    for number in range(3):
        factories.ingest(conn, id=f"j{number}", queue=QUEUE)
    jobs = transitions.claim(conn, transitions.who(QUEUE), 3)
    ends = {
        job_tables.lease_of(job_tables.INGEST_JOBS, job): guards.LeaseEnd(0.0, 5.0) for job in jobs
    }
    with app_triggers.refusing(conn, "ingest_jobs", "OLD.id = 'j1'"):
        found = claim_writes.renew(conn, ends, {}, lease_s=60.0, sent=100.0)
    assert found == claims_in_flight.RenewalResult([], [])
    assert {lease.job_id: end.ends for lease, end in ends.items()} == {
        "j0": 105.0,
        "j1": 5.0,
        "j2": 105.0,
    }
