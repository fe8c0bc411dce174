"""Several nodes are recorded and claimed in one call with the same effect as one by one."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db, errors
from queue_workflows.types import Row
from tests.support import factories, tabled, transitions

JOB = (
    "node_id, status, context_delta, error, seconds, vm_rss_mb_peak, resolved_inputs, progress,"
    " worker_id, claimed_by, host_label, claim_no, generation, attempts, crash_count,"
    " lease_expires_at IS NULL AS free, finished_at IS NULL AS open, started_at IS NULL AS new"
)
EVENT = "node_id, event_type, attempt, host_label, queue, model, elapsed_s, worker_id, claim_no"
OUTBOX = "node_id, kind, claim_no, generation, processed_at IS NOT NULL AS processed"
RUN = "status, progress_pct, error, finished_at IS NULL AS open"


def state(conn: db.Connection, run_id: str) -> dict[str, list[Row]]:
    """Return what a call leaves of a run, without what differs by chance: ids and times."""

    def rows(query: str) -> list[Row]:
        return conn.execute(query.encode(), (run_id,)).fetchall()

    by_name = "FROM {} WHERE run_id = %s ORDER BY node_id"
    return {
        "jobs": rows(f"SELECT {JOB} {by_name.format('workflow_node_jobs')}"),
        "events": rows(f"SELECT {EVENT} {by_name.format('workflow_node_events')}, event_type"),
        "outbox": rows(f"SELECT {OUTBOX} {by_name.format('workflow_dispatch_events')}"),
        "run": rows(f"SELECT {RUN} FROM workflow_runs WHERE id = %s"),
    }


def begin(conn: db.Connection, context: dict[str, Any] | None = None) -> tuple[str, list[Row]]:
    """Return a new run with two claimed nodes, `a` and `b`, and four that are queued."""
    run_id = factories.run(conn, context=context or {})
    for node_id in "abcdef":
        more = {"priority": 50} if node_id == "f" else {}
        factories.node(conn, run_id, node_id, inputs={"of": node_id}, **more)
    conn.execute("UPDATE workflow_node_jobs SET priority = 10 WHERE node_id IN ('a', 'b')")
    return run_id, [transitions.claim_node(conn) for _ in "ab"]


NOTHING, END = transitions.plan(), transitions.plan(complete=True)
PLANS: dict[str, tuple[Any, Any]] = {
    "nothing known": (None, None),
    "nothing follows": (NOTHING, NOTHING),
    "nodes follow": (NOTHING, transitions.plan("x", "y")),
    "two plans": (transitions.plan("x"), transitions.plan("y")),
    "the run ends": (NOTHING, END),
    "another generation": (
        transitions.plan("x", generation=1), transitions.plan(complete=True, generation=1),
    ),
    "one of two known": (None, transitions.plan("x")),
}  # fmt: skip
LEFT: dict[str, tuple[list[bool], list[str], str]] = {
    "nothing known": ([False, False], [], "running"),
    "nothing follows": ([True, True], [], "running"),
    "nodes follow": ([True, True], ["x", "y"], "running"),
    "two plans": ([True, True], ["x", "y"], "running"),
    "the run ends": ([True, True], [], "completed"),
    "another generation": ([False, False], [], "running"),
    "one of two known": ([False, True], ["x"], "running"),
}
"""What each plan leaves: whether both events are processed, the new nodes, the run's status."""


def test_several_results_leave_what_single_ones_leave(conn: db.Connection) -> None:
    for name in PLANS:
        with tabled.case(name):
            left: list[dict[str, list[Row]]] = []
            for at_once in (False, True):
                run_id, jobs = begin(conn)
                done = [*zip(jobs, PLANS[name], strict=True)]
                for part in [done] if at_once else ([each] for each in done):
                    assert transitions.complete_with_plans(conn, part) == []
                left.append(state(conn, run_id))
                factories.empty(conn, "workflow_runs")
            single, several = left
            assert several == single
            assert [job["status"] for job in several["jobs"][:2]] == ["completed"] * 2
            processed = [each["processed"] for each in several["outbox"]]
            follow = [job["node_id"] for job in several["jobs"] if job["node_id"] in ("x", "y")]
            assert (processed, follow, several["run"][0]["status"]) == LEFT[name]


@pytest.mark.parametrize("newest", [False, True])
def test_several_claims_take_what_single_ones_take(conn: db.Connection, newest: bool) -> None:
    who = transitions.who(newest=newest)
    taken: list[list[Row]] = []
    for at_once in (False, True):
        run_id, _ = begin(conn, {"key": 5})
        conn.execute(
            "UPDATE workflow_node_jobs SET ref_heads = '{key,a}' WHERE run_id = %s AND"
            " node_id = 'd'",
            (run_id,),
        )
        if at_once:
            jobs = transitions.claim(conn, who, 3)
        else:
            jobs = [transitions.claim_node(conn, who) for _ in range(3)]
        own = ("id", "run_id", "run", "seq")
        taken.append([{key: job[key] for key in job if key not in own} for job in jobs])
        assert [job["run"]["id"] for job in jobs] == [run_id] * 3
        factories.empty(conn, "workflow_runs")
    single, several = taken
    assert several == single
    expected = ["f", "e", "d"] if newest else ["f", "c", "d"]
    assert [job["node_id"] for job in several] == expected
    assert several[2]["context"] == {"key": 5}
    assert several[0]["context"] is None


def test_a_run_that_another_session_has_locked_leaves_its_events_open(conn: db.Connection) -> None:
    run_id, jobs = begin(conn)
    done = [(job, transitions.plan("x", complete=True)) for job in jobs]
    with db.connect() as other, other.transaction():
        other.execute("SELECT FROM workflow_runs WHERE id = %s FOR NO KEY UPDATE", (run_id,))
        transitions.complete_with_plans(conn, done)
    left = state(conn, run_id)
    assert [each["processed"] for each in left["outbox"]] == [False, False]
    assert "x" not in [each["node_id"] for each in left["jobs"]]
    assert left["run"][0]["status"] == "running"


def test_one_lost_claim_of_several_leaves_all_as_they_were(conn: db.Connection) -> None:
    run_id, jobs = begin(conn)
    before = state(conn, run_id)
    done = [(jobs[0], transitions.plan("x")), (jobs[1] | {"claim_no": 9}, None)]
    with pytest.raises(errors.ClaimLost, match="1 of 2 claims"):
        transitions.complete_with_plans(conn, done, count=2)
    assert state(conn, run_id) == before


def test_a_result_that_is_given_twice_is_a_lost_claim(conn: db.Connection) -> None:
    run_id, jobs = begin(conn)
    before = state(conn, run_id)
    with pytest.raises(errors.ClaimLost, match="1 of 2 claims"):
        transitions.complete_with_plans(conn, [(jobs[0], None)] * 2, count=2)
    assert state(conn, run_id) == before


def test_a_machine_that_is_off_records_several_and_claims_none(conn: db.Connection) -> None:
    run_id, jobs = begin(conn)
    factories.insert(conn, "worker_controls", host_label="box", queue="cpu", desired_state="off")
    done = [(job, None) for job in jobs]
    assert transitions.complete_with_plans(conn, done, transitions.who(obey=True), 2) == []
    assert [job["status"] for job in state(conn, run_id)["jobs"][:2]] == ["completed"] * 2
    assert len(transitions.claim(conn, transitions.who(obey=False), 2)) == 2


def test_jobs_of_a_run_that_is_over_are_no_claims(conn: db.Connection) -> None:
    over, _ = begin(conn)
    with factories.unguarded(conn, "workflow_runs"):
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (over,))
    live = factories.run(conn)
    factories.node(conn, live, "g")
    assert [job["node_id"] for job in transitions.claim(conn, transitions.who(), 3)] == ["g"]


def test_nodes_that_follow_are_claimed_in_the_same_call(conn: db.Connection) -> None:
    _, jobs = begin(conn)
    conn.execute("UPDATE workflow_node_jobs SET status = 'cancelled' WHERE status = 'queued'")
    done = [(jobs[0], None), (jobs[1], transitions.plan("x"))]
    claimed = transitions.complete_with_plans(conn, done, count=2)
    assert [job["node_id"] for job in claimed] == ["x"]


def test_due_nodes_are_admitted_first(conn: db.Connection) -> None:
    factories.node(
        conn, None, "later", blocked_reason="not_due", available_at="2020-01-01 00:00+00"
    )
    assert transitions.claim(conn, transitions.who(), 2) == []
    (job,) = transitions.claim(conn, transitions.who(), 2, promote=True)
    assert job["node_id"] == "later"
