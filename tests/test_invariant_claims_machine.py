"""A state machine: any order of claims, ends, crashes, cancels and retries keeps the invariants."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from queue_workflows import errors, node_queue
from queue_workflows import jobs as jobs_api
from queue_workflows.types import Row
from tests.support import factories, invariants, transitions
from tests.support.examples import examples

TERMINAL = ("completed", "failed", "cancelled", "skipped")
JOBS = transitions.TABLES
QUEUE = {"node": "cpu", "ingest": "fetch"}
FAMILY = st.sampled_from(["node", "ingest"])
WORKER = st.sampled_from(["box:1", "box:2", "den:1"])
PICK = st.integers(0, 10_000)
STATUS = "SELECT status FROM workflow_runs WHERE id = %s"


def complete(conn: Any, job: Row) -> bool:
    try:
        transitions.complete(conn, job)
    except errors.ClaimLost:
        return False
    return True


ACTIONS: dict[str, Callable[[Any, Row], bool]] = {
    "complete": complete,
    "fail": lambda conn, job: transitions.fail(conn, job) is not None,
    "renew": lambda conn, job: bool(transitions.renew(conn, job)),
    "park": lambda conn, job: transitions.park(conn, job) is not None,
    "hand back": lambda conn, job: transitions.hand_back(conn, job) is not None,
    "trip": lambda conn, job: transitions.end_by_watchdog(conn, job) is not None,
}


class Claims(RuleBasedStateMachine):
    """Apps, workers, sweeps and operators in any order, on one connection."""

    conn: Any

    def __init__(self) -> None:
        super().__init__()
        factories.empty(self.conn, "workflow_runs", "ingest_jobs", "ingest_job_events")
        self.run_ids: list[str] = []
        self.claimed: list[Row] = []
        self.seen: dict[str, Row] = {}

    # Apps.

    @rule()
    def add_run(self) -> None:
        self.run_ids.append(factories.run(self.conn))

    @precondition(lambda self: self.run_ids)
    @rule(
        pick=PICK,
        priority=st.sampled_from([1, 100]),
        attempts=st.integers(1, 3),
        late=st.booleans(),
    )
    def add_node(self, pick: int, priority: int, attempts: int, late: bool) -> None:
        run_id = self.run_ids[pick % len(self.run_ids)]
        if factories.one(self.conn, STATUS, run_id) == "running":
            factories.node(
                self.conn, run_id, f"n{pick}-{len(self.seen)}", priority=priority,
                max_attempts=attempts, available_at="2999-01-01" if late else None,
            )  # fmt: skip

    @rule(priority=st.sampled_from([1, 100]), attempts=st.integers(1, 3), late=st.booleans())
    def add_ingest(self, priority: int, attempts: int, late: bool) -> None:
        factories.ingest(
            self.conn, priority=priority, max_attempts=attempts,
            available_at="2999-01-01" if late else None,
        )  # fmt: skip

    @precondition(lambda self: self.run_ids)
    @rule(pick=PICK, status=st.sampled_from(["cancelled", "cancelled", "failed"]))
    def end_run(self, pick: int, status: str) -> None:
        self.conn.execute(
            "UPDATE workflow_runs SET status = %s, finished_at = now()"
            " WHERE id = %s AND status = 'running'",
            (status, self.run_ids[pick % len(self.run_ids)]),
        )

    @precondition(lambda self: self.run_ids)
    @rule(pick=PICK)
    def reopen_run(self, pick: int) -> None:
        run_id = self.run_ids[pick % len(self.run_ids)]
        reopened = self.conn.execute(
            "UPDATE workflow_runs SET status = 'queued' WHERE id = %s"
            " AND status IN ('failed', 'cancelled')",
            (run_id,),
        ).rowcount
        if not reopened:
            return
        nodes = [job["node_id"] for job in node_queue.list_jobs_for_run(run_id)]
        transitions.start_run(self.conn, run_id, *nodes)

    # Workers.

    @rule(family=FAMILY, worker=WORKER)
    def claim(self, family: str, worker: str) -> None:
        expected = factories.column(
            self.conn,
            f"SELECT j.id FROM {JOBS[family]} j WHERE j.status = 'queued'"
            " AND j.blocked_reason IS NULL"
            + (
                " AND (SELECT r.status FROM workflow_runs r WHERE r.id = j.run_id) = 'running'"
                if family == "node"
                else ""
            )
            + " ORDER BY j.priority, j.seq LIMIT 1",
        )
        who = transitions.who(QUEUE[family], worker, host=worker.split(":")[0])
        jobs = transitions.claim(self.conn, who)
        assert [job["id"] for job in jobs] == expected
        self.claimed += jobs

    @precondition(lambda self: self.claimed)
    @rule(pick=PICK, action=st.sampled_from(sorted(ACTIONS)))
    def act(self, pick: int, action: str) -> None:
        job = self.claimed[pick % len(self.claimed)]
        if action == "park" and "node_id" not in job:
            return
        before = factories.reread(self.conn, job)
        held = (before["status"], before["worker_id"], before["claim_no"]) == (
            "running", job["worker_id"], job["claim_no"],
        )  # fmt: skip
        assert ACTIONS[action](self.conn, job) is held
        if not held:
            assert factories.reread(self.conn, job) == before

    @precondition(lambda self: self.claimed)
    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        transitions.expire(self.conn, self.claimed[pick % len(self.claimed)])

    # Sweeps.

    @rule()
    def reclaim(self) -> None:
        node_queue.reclaim_expired_leases()
        node_queue.reclaim_expired_ingest_leases()

    @rule()
    def time_passes(self) -> None:
        for table in JOBS.values():
            self.conn.execute(
                f"UPDATE {table} SET available_at = now() - interval '1 s'"
                " WHERE blocked_reason = 'not_due'"
            )
        transitions.promote_due(self.conn)

    # Operators.

    @precondition(lambda self: self.claimed)
    @rule(pick=PICK, what=st.sampled_from(["complete", "fail", "cancel", "retry", "requeue"]))
    def operate(self, pick: int, what: str) -> None:
        job = self.claimed[pick % len(self.claimed)]
        node = "node_id" in job
        if what == "complete" and node:
            node_queue.mark_completed(job["id"], context_delta={})
        elif what == "complete":
            node_queue.mark_ingest_completed(job["id"])
        elif what == "fail":
            (node_queue.mark_failed if node else node_queue.mark_ingest_failed)(
                job["id"], error="by hand"
            )
        elif what == "cancel":
            jobs_api.cancel(job["id"])
        elif what == "requeue" and node:
            node_queue.requeue_job_for_retry(job["id"])
        elif what == "requeue":
            node_queue.requeue_running_for_worker("box", "fetch")
        elif not node and factories.reread(self.conn, job)["status"] in ("failed", "cancelled"):
            jobs_api.retry(job["id"])

    # What must hold.

    @invariant()
    def the_invariants_hold(self) -> None:
        assert invariants.broken(self.conn) == []

    @invariant()
    def no_row_goes_back(self) -> None:
        for table in JOBS.values():
            for row in self.conn.execute(f"SELECT * FROM {table}").fetchall():
                old = self.seen.get(row["id"], row)
                assert row["claim_no"] - old["claim_no"] in (0, 1)
                assert row["generation"] >= old["generation"]
                if row["generation"] == old["generation"]:
                    assert old["status"] not in TERMINAL or row["status"] == old["status"]
                    for counter in ("attempts", "crash_count", "watchdog_retries"):
                        assert row[counter] >= old[counter]
                self.seen[row["id"]] = row


def test_any_order_of_events_keeps_the_invariants(db: ModuleType) -> None:
    with db.connect() as conn:
        machine = type("Claims", (Claims,), {"conn": conn})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples(15),
                stateful_step_count=30,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
