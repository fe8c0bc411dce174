"""The history of runs and jobs: attempts put together from events, and what the rows add."""

from __future__ import annotations

import uuid
from types import ModuleType
from typing import Any

from psycopg import sql

import queue_workflows
from queue_workflows import db as engine
from queue_workflows import dispatcher, history
from queue_workflows.db import statements
from queue_workflows.engine import attempts, job_events
from queue_workflows.engine import history_rows as rows
from tests.support import factories, flow, transitions
from tests.support.flow import Flow


def attempts_of(job_id: str) -> dict[str, Any]:
    found = history.get_job(job_id)
    assert found is not None
    return found


def outcomes(job_id: str) -> list[str]:
    return [attempt["outcome"] for attempt in attempts_of(job_id)["attempts"]]


def test_a_run_shows_its_nodes_in_the_workflows_order(toy: Flow) -> None:
    flow.body({"n": 7}, name="seven")
    toy.define(
        flow.step("s"),
        s=[{"id": "a", "node": "seven"}, *flow.nodes(b="a", c="b")],
    )
    run_id = toy.started()
    toy.work()
    shown = history.get_run(run_id)
    assert shown is not None
    assert [(node["node_id"], node["status"]) for node in shown["nodes"]] == [
        ("s/a", "completed"), ("s/b", "completed"), ("s/c", "completed"),
    ]  # fmt: skip
    assert shown["nodes"][0]["output"] == {"n": 7}
    assert [node["depends_on"] for node in shown["nodes"]] == [[], ["s/a"], ["s/b"]]
    (attempt,) = shown["nodes"][0]["attempts"]
    assert (attempt["host_label"], attempt["outcome"]) == ("box", "completed")
    assert attempt["waited_s"] >= 0
    assert attempt["ran_s"] >= 0
    assert attempt["pid"]
    assert attempt["claimed_at"] <= attempt["ended_at"]


def test_a_node_that_is_not_queued_yet_waits(toy: Flow) -> None:
    toy.dag(a="", b="a")
    shown = history.get_run(toy.started())
    assert shown is not None
    assert [node["status"] for node in shown["nodes"]] == ["queued", "waiting"]
    assert shown["nodes"][1]["id"] is None
    assert (shown["nodes_total"], shown["counts"]) == (2, {"queued": 1, "waiting": 1})


def test_only_the_named_nodes_are_read(toy: Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    shown = history.get_run(run_id, nodes=["s/b"])
    assert shown is not None
    assert [node["node_id"] for node in shown["nodes"]] == ["s/b"]
    assert shown["nodes_total"] == 2


def test_the_start_of_an_id_is_a_range_of_the_index(conn: engine.Connection) -> None:
    ids = [str(uuid.uuid4()) for _ in range(300)]
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name) SELECT unnest(%s::text[]), 'w'", (ids,)
    )
    for start in (ids[0], ids[0][:13], ids[0][:9], ids[0][:8], ids[0][:1]):
        wanted = sorted(one for one in ids if one.startswith(start))
        found = rows.starting_with(conn, start, limit=400)
        assert [(row["kind"], row["id"]) for row in found] == [("run", one) for one in wanted]
    for start in ("x", "0" * 37, "A", "%", "ab-", "-"):
        assert rows.starting_with(conn, start, limit=400) == []


COLLATIONS = (
    "SELECT collname FROM pg_collation WHERE collencoding IN (-1, 6)"
    " AND collname = ANY (ARRAY['C', 'und-x-icu', 'sv-x-icu', 'en_US.utf8'])"
)


def test_every_collation_has_uuids_in_the_order_of_their_digits(conn: engine.Connection) -> None:
    known = factories.column(conn, COLLATIONS)
    assert "C" in known
    for collation in known:
        in_order(conn, collation)


def in_order(conn: engine.Connection, collation: str) -> None:
    ids = [str(uuid.uuid4()) for _ in range(1000)]
    conn.execute(
        sql.SQL("CREATE TEMP TABLE workflow_runs (id text COLLATE {} PRIMARY KEY)").format(
            sql.Identifier(collation)
        )
    )
    conn.execute("INSERT INTO workflow_runs SELECT unnest(%s::text[])", (ids,))
    conn.execute("SET enable_seqscan = off")
    seen = rows.starting_with(conn, "a", limit=1000)
    assert sorted(row["id"] for row in seen) == sorted(one for one in ids if one[0] == "a")
    statement = b"EXPLAIN " + statements.history_rows.ids_in_range
    values = {"prefix": "a", "low": "a0", "high": "af", "limit": 5}
    plan = "\n".join(next(iter(row.values())) for row in conn.execute(statement, values))
    assert plan.count("Index Cond: ((id >= ") == 3, plan
    assert "Seq Scan" not in plan
    conn.execute("DROP TABLE pg_temp.workflow_runs")


def test_inputs_are_those_that_the_handler_received(toy: Flow) -> None:
    flow.body({"n": 7}, name="seven")
    inputs = [{"name": "got", "from": "pipeline.got"}]
    toy.define(
        flow.step("s"),
        flow.step("t", inputs={"got": {"$from": "s/a.n"}}, depends_on=["s"]),
        s=[{"id": "a", "node": "seven"}],
        t=[{"id": "b", "node": "ok", "inputs": inputs}],
    )
    run_id = toy.started()
    toy.work()
    assert attempts_of(flow.job(run_id, "t/b")["id"])["inputs"] == {"got": 7}


def test_a_failure_shows_its_error_and_traceback(toy: Flow) -> None:
    def broken() -> None:
        raise ValueError("no good")

    flow.body(broken, name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    shown = attempts_of(flow.job(run_id, "s/a")["id"])
    assert shown["error"] == shown["attempts"][0]["error"] == "ValueError: no good"
    assert "raise ValueError" in shown["traceback"]
    assert shown["attempts"][0]["outcome"] == "failed"
    assert shown["output"] is None


def test_every_claim_is_an_attempt_with_its_own_end(conn: engine.Connection) -> None:
    job = factories.node(conn, priority=50)
    held = transitions.claim_node(conn)
    transitions.hand_back(conn, held, reason="shutdown")
    held = transitions.claim_node(conn, transitions.who(worker_id="box:77:m:r"))
    transitions.expire(conn, held)
    transitions.reclaim_lapsed(conn, "node")
    held = transitions.claim_node(conn)
    transitions.complete_node(conn, held, done=True)
    shown = attempts_of(job["id"])
    assert [a["outcome"] for a in shown["attempts"]] == ["requeued", "reclaimed", "completed"]
    assert [a["claim_no"] for a in shown["attempts"]] == [1, 2, 3]
    assert [a["pid"] for a in shown["attempts"]] == [None, 77, None]
    first, second = shown["attempts"][:2]
    assert second["queued_at"] == first["ended_at"]
    assert shown["output"] == {"done": True}


def test_an_end_by_a_guard_shows_its_reason_and_the_outcome_of_the_job(
    conn: engine.Connection,
) -> None:
    job = factories.node(conn)
    held = transitions.claim_node(conn)
    lease = transitions.lease_of(held)
    row = attempts.end_by_watchdog(conn, lease, error="over its budget", seconds=9.0)
    assert row is not None
    named = row | {"worker_id": lease.worker_id}
    job_events.note(conn, lease.table, named, "budget_trip", detail="{}", elapsed_s=9.0)
    (attempt,) = attempts_of(job["id"])["attempts"]
    assert (attempt["outcome"], attempt["error"], attempt["ran_s"]) == (
        "requeued", "over its budget", 9.0,
    )  # fmt: skip
    kinds = [event["event_type"] for event in attempt["events"]]
    assert kinds == ["claimed", "requeued", "budget_trip"]


def test_an_event_without_a_claim_belongs_to_the_one_before(conn: engine.Connection) -> None:
    job = factories.node(conn)
    transitions.claim_node(conn)
    conn.execute(
        "INSERT INTO workflow_node_events (run_id, node_id, event_type, elapsed_s)"
        " VALUES (%s, 'n', 'model_load_done', 2.5)",
        (job["run_id"],),
    )
    (attempt,) = attempts_of(job["id"])["attempts"]
    assert [event["event_type"] for event in attempt["events"]] == ["claimed", "model_load_done"]
    assert attempt["outcome"] == "running"
    assert attempt["ran_s"] is not None


def test_without_its_events_an_attempt_is_described_by_the_row(conn: engine.Connection) -> None:
    job = factories.node(conn)
    transitions.complete_node(conn, transitions.claim_node(conn))
    conn.execute("DELETE FROM workflow_node_events")
    (attempt,) = attempts_of(job["id"])["attempts"]
    assert (attempt["claim_no"], attempt["outcome"], attempt["host_label"]) == (
        1, "completed", "box",
    )  # fmt: skip
    assert attempt["ended_at"] is not None


def test_an_ingest_job_has_a_history_of_its_own(conn: engine.Connection) -> None:
    job = factories.ingest(conn, max_attempts=2, args={"n": 1})
    held = transitions.claim_ingest(conn)
    transitions.fail(conn, held, error="once")
    conn.execute("UPDATE ingest_jobs SET available_at = NULL, blocked_reason = NULL")
    transitions.complete_ingest(conn, transitions.claim_ingest(conn), rows=3)
    shown = attempts_of(job["id"])
    assert (shown["kind"], shown["inputs"], shown["output"]) == (
        "ingest job", {"n": 1}, {"rows": 3},
    )  # fmt: skip
    assert outcomes(job["id"]) == ["retried", "completed"]
    assert [attempt["error"] for attempt in shown["attempts"]] == ["once", None]


def test_a_reopened_node_has_waited_since_its_run_was_queued_again(toy: Flow) -> None:
    def broken() -> None:
        raise ValueError("once")

    flow.body(broken, name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    flow.body({}, name="ok")
    queue_workflows.retry_run(run_id)
    dispatcher.start_run(run_id)
    toy.work()
    first, second = attempts_of(flow.job(run_id, "s/a")["id"])["attempts"]
    assert (first["outcome"], second["outcome"]) == ("failed", "completed")
    assert second["queued_at"] == flow.run(run_id)["queued_at"] > first["ended_at"]


def test_an_unknown_id_is_none(db: ModuleType) -> None:
    assert history.get_run("nope") is None
    assert history.get_job("nope") is None
