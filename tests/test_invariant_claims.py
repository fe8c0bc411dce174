"""Invariants of claims: one holder, one end, one record; a late write changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from queue_workflows import db, errors, node_queue, run_store
from queue_workflows.types import Row
from tests.support import factories, invariants, tabled, transitions

FAMILIES = transitions.KINDS


@pytest.fixture
def conn(conn: Any) -> Iterator[Any]:
    yield conn
    assert invariants.broken(conn, slack_s=5) == []


def queue_of(family: transitions.Kind) -> str:
    return "cpu" if family == "node" else "fetch"


def make(conn: Any, family: transitions.Kind, **columns: Any) -> Row:
    return factories.of(conn, family, **columns)


def claim(conn: Any, family: transitions.Kind, worker_id: str = "w1") -> Row:
    who = transitions.who(queue_of(family), worker_id)
    return (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn, who)


def complete(conn: Any, job: Row) -> bool:
    try:
        transitions.complete(conn, job, by=job["worker_id"])
    except errors.ClaimLost:
        return False
    return True


def complete_and_claim(conn: Any, job: Row) -> bool:
    who = transitions.who(job["queue"], job["worker_id"])
    try:
        transitions.complete_and_claim(conn, [job], who)
    except errors.ClaimLost:
        return False
    return True


# What a worker may do with its claim; each returns whether it was accepted.
ACTIONS: dict[str, Callable[[Any, Row], bool]] = {
    "complete": complete,
    "complete and claim": complete_and_claim,
    "fail": lambda conn, job: transitions.fail(conn, job) is not None,
    "renew": lambda conn, job: bool(transitions.renew(conn, job)),
    "report": lambda conn, job: bool(transitions.renew(conn, job, progress=['{"late": 1}'])),
    "park": lambda conn, job: transitions.park(conn, job) is not None,
    "hand back": lambda conn, job: transitions.hand_back(conn, job) is not None,
    "hand back together": lambda conn, job: bool(transitions.hand_back_all(conn, [job])),
    "trip": lambda conn, job: transitions.end_by_watchdog(conn, job) is not None,
}
OF_FAMILY = [
    (family, action)
    for family in FAMILIES
    for action in ACTIONS
    if (family, action) != ("ingest", "park")
]


def footprint(conn: Any) -> list[Row]:
    """Everything that a write would leave behind."""
    return [
        row
        for table in (
            "workflow_node_jobs", "ingest_jobs", "workflow_node_events", "ingest_job_events",
            "workflow_dispatch_events",
        )
        for row in conn.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
    ]  # fmt: skip


# --- a claim that was superseded ---------------------------------------------------------------


@pytest.mark.parametrize(("family", "action"), OF_FAMILY)
def test_the_holder_may(conn: Any, family: transitions.Kind, action: str) -> None:
    make(conn, family)
    assert ACTIONS[action](conn, claim(conn, family)) is True


@pytest.mark.parametrize(("family", "action"), OF_FAMILY)
def test_a_superseded_claim_writes_nothing(
    conn: Any, family: transitions.Kind, action: str
) -> None:
    for successor in ("w2", "w1", None):  # another worker, the same one, nobody
        with tabled.case(successor):
            made = make(conn, family)
            old = claim(conn, family)
            assert old["id"] == made["id"]
            transitions.expire(conn, old)
            transitions.reclaim_lapsed(conn, family)
            if successor is not None:
                assert claim(conn, family, successor)["id"] == made["id"]
            before = footprint(conn)
            assert ACTIONS[action](conn, old) is False
            assert footprint(conn) == before


@pytest.mark.parametrize(("family", "action"), OF_FAMILY)
def test_a_claim_that_has_ended_writes_nothing_more(
    conn: Any, family: transitions.Kind, action: str
) -> None:
    make(conn, family)
    job = claim(conn, family)
    assert complete(conn, job)
    before = footprint(conn)
    assert ACTIONS[action](conn, job) is False
    assert footprint(conn) == before


@pytest.mark.parametrize(("family", "action"), OF_FAMILY)
def test_two_workers_of_one_label_are_two(conn: Any, family: transitions.Kind, action: str) -> None:
    for _ in range(2):
        make(conn, family)
    first, second = claim(conn, family, "box:1"), claim(conn, family, "box:2")
    assert first["claimed_by"] == second["claimed_by"]
    before = footprint(conn)
    assert ACTIONS[action](conn, first | {"worker_id": second["worker_id"]}) is False
    assert ACTIONS[action](conn, first | {"claim_no": first["claim_no"] + 1}) is False
    assert footprint(conn) == before


def test_a_batch_with_one_lost_claim_completes_none(conn: Any) -> None:
    for _ in range(3):
        make(conn, "ingest")
    jobs = transitions.claim(conn, transitions.who("fetch"), 3)
    transitions.expire(conn, jobs[1])
    transitions.reclaim_lapsed(conn, "ingest")
    before = footprint(conn)
    with pytest.raises(errors.ClaimLost):
        transitions.complete_and_claim(conn, jobs, transitions.who("fetch"))
    assert footprint(conn) == before


def test_a_lost_claim_claims_nothing_in_its_place(conn: Any) -> None:
    first, second = (make(conn, "node") for _ in range(2))
    job = claim(conn, "node")
    conn.execute(
        "UPDATE workflow_node_jobs SET claim_no = claim_no + 1 WHERE id = %s", (first["id"],)
    )
    assert complete_and_claim(conn, job) is False
    assert factories.reread(conn, second)["status"] == "queued"
    conn.execute("UPDATE workflow_node_jobs SET claim_no = 1 WHERE id = %s", (first["id"],))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renewal_pushes_the_lease_and_stores_progress(
    conn: Any, family: transitions.Kind
) -> None:
    make(conn, family)
    job = claim(conn, family)
    transitions.expire(conn, job)
    assert transitions.renew(conn, job, lease_s=60, progress=['{"at": 0.5}']) == [
        (job["id"], 1, False, True)
    ]
    left = "SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM "
    assert 55 < factories.one(conn, left + transitions.TABLES[family]) <= 60
    (_,) = transitions.renew(conn, job, lease_s=60)
    assert factories.reread(conn, job)["progress"] == {"at": 0.5}
    assert transitions.reclaim_lapsed(conn, family) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renewal_reports_a_cancel_request(conn: Any, family: transitions.Kind) -> None:
    make(conn, family)
    job = claim(conn, family)
    factories.change(conn, job, "cancel_requested_at = now()")
    (renewal,) = transitions.renew(conn, job)
    assert renewal.cancel is True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renewal_leaves_out_a_row_that_somebody_has_locked(
    conn: Any, dsn: str, family: transitions.Kind
) -> None:
    make(conn, family)
    job = claim(conn, family)
    transitions.expire(conn, job)
    with psycopg.connect(dsn) as stranger:
        table = sql.Identifier(transitions.TABLES[family])
        stranger.execute(sql.SQL("UPDATE {} SET priority = priority").format(table))
        conn.execute("SET statement_timeout = '5s'")
        (renewal,) = transitions.renew(conn, job)
        conn.execute("RESET statement_timeout")
        assert (renewal.renewed, renewal.cancel) == (False, False)
        stranger.rollback()
    (renewal,) = transitions.renew(conn, job)
    assert renewal.renewed


def test_a_renewal_reports_that_the_run_is_over(conn: Any) -> None:
    make(conn, "node")
    job = claim(conn, "node")
    conn.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")
    (renewal,) = transitions.renew(conn, job)
    assert renewal.cancel is True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_claim_has_recorded_what_its_own_event_contains(
    conn: Any, family: transitions.Kind
) -> None:
    make(conn, family)
    first = claim(conn, family)
    assert not transitions.is_recorded(conn, first, "completed")
    transitions.expire(conn, first)
    transitions.reclaim_lapsed(conn, family)
    assert not transitions.is_recorded(conn, first, "completed")
    assert not transitions.is_recorded(conn, first, "failed")
    second = claim(conn, family)
    assert not transitions.is_recorded(conn, first, "completed")
    complete(conn, second)
    assert transitions.is_recorded(conn, second, "completed")
    assert not transitions.is_recorded(conn, second, "failed")


# --- at once -----------------------------------------------------------------------------------


def race(count: int, body: Callable[[Any, int], None]) -> None:
    """Run `body(connection, number)` in separate threads; the first error is raised."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with db.connect() as conn:
                body(conn, number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_claimants_at_once_share_no_job(conn: Any, family: transitions.Kind) -> None:
    run = factories.run(conn)
    for number in range(120):
        if family == "node":
            factories.node(conn, run, f"n{number}")
        else:
            factories.ingest(conn)
    found: list[Row] = []

    def work(own: Any, number: int) -> None:
        who = transitions.who(queue_of(family), f"w{number}")
        jobs = transitions.claim(own, who)
        while jobs:
            found.extend(jobs)
            jobs = transitions.complete_and_claim(own, jobs, who)

    race(6, work)
    assert len(found) == 120
    assert len({job["id"] for job in found}) == 120
    assert {job["claim_no"] for job in found} == {1}


def test_batches_at_once_share_no_job(conn: Any) -> None:
    for _ in range(100):
        factories.ingest(conn)
    found: list[list[Row]] = []

    def work(own: Any, number: int) -> None:
        who = transitions.who("fetch", f"w{number}")
        while batch := transitions.claim(own, who, 7):
            found.append(batch)

    race(4, work)
    assert max(len(batch) for batch in found) == 7
    ids = [job["id"] for batch in found for job in batch]
    assert len(ids) == len(set(ids)) == 100
    for batch in found:
        assert [job["seq"] for job in batch] == sorted(job["seq"] for job in batch)


@pytest.mark.parametrize("known", [None, ["a", "b", "c"]])
def test_gpu_claimants_at_once_share_no_job(conn: Any, known: list[str] | None) -> None:
    run = factories.run(conn)
    for number in range(60):
        model = [None, "a", "b", "c"][number % 4]
        factories.node(conn, run, f"n{number}", queue="gpu", required_model=model)
    found: list[str] = []

    def work(own: Any, number: int) -> None:
        model: str | None = None
        while True:
            who = transitions.who(
                "gpu", f"w{number}", model=model, models=known, newest=number == 0
            )
            jobs = transitions.claim(own, who)
            if not jobs:
                return
            model = jobs[0]["required_model"]
            found.append(jobs[0]["id"])

    race(4, work)
    assert len(found) == len(set(found)) == 60


def test_after_an_acknowledged_cancel_nothing_of_the_run_is_claimed(conn: Any) -> None:
    run = factories.run(conn)
    for number in range(400):
        factories.node(conn, run, f"n{number}")
    acknowledged = threading.Event()
    late: list[str] = []
    counts = [0] * 4

    def work(own: Any, number: int) -> None:
        if number == 3:
            while sum(counts) < 20:
                acknowledged.wait(0.001)
            own.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")
            acknowledged.set()
            return
        while True:
            after = acknowledged.is_set()
            jobs = transitions.claim(own, transitions.who("cpu", f"w{number}"))
            if after:
                late.extend(job["id"] for job in jobs)
            if not jobs:
                return
            counts[number] += 1

    race(4, work)
    assert late == []
    assert sum(counts) < 400
    waiting = "SELECT count(*) FROM workflow_node_jobs WHERE status = 'queued'"
    assert factories.one(conn, waiting) == 0


def test_reclaimers_and_finishers_at_once_end_each_job_once(conn: Any) -> None:
    for _ in range(60):
        factories.ingest(conn)
    jobs = transitions.claim(conn, transitions.who("fetch"), 60)
    conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s'")
    completed: list[str] = []
    reclaimed: list[str] = []

    def work(own: Any, number: int) -> None:
        if number < 2:
            while rows := transitions.reclaim_lapsed(own, "ingest"):
                reclaimed.extend(row["id"] for row in rows)
            return
        for job in jobs[number - 2 :: 2]:
            if complete(own, job):
                completed.append(job["id"])

    race(4, work)
    assert sorted(completed + reclaimed) == sorted(job["id"] for job in jobs)


# --- what was acknowledged exists ----------------------------------------------------------------


def test_an_acknowledged_write_is_visible_to_every_session(conn: Any) -> None:
    ids: list[tuple[str, str]] = []

    def submit(own: Any, number: int) -> None:
        for step in range(5):
            run = run_store.insert_run(workflow_name="w", status="running")["id"]
            job = node_queue.enqueue_node_job(
                run_id=run, node_id=f"{number}-{step}", node_module="m", queue="cpu"
            )
            own.execute("SELECT 1")
            ids.append((run, job))

    race(3, submit)
    db.close_pool()
    assert len(ids) == 15
    for run, job in ids:
        found = node_queue.get_node_job(job)
        assert found is not None
        assert found["run_id"] == run
