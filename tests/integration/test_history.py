"""The history of runs and jobs: attempts put together from events, and what the rows add."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, dispatcher, errors, history
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


class Names(list[str]):
    """A list of names that fails if it is searched: for many nodes that takes their square."""

    def __contains__(self, name: object) -> bool:
        raise AssertionError(f"a search for {name!r}")


def test_a_list_of_names_is_not_searched_for_each_node(toy: Flow) -> None:
    toy.dag(a="", b="a", c="b")
    shown = history.get_run(toy.started(), nodes=Names(["s/b", "s/c"]))
    assert shown is not None
    assert [node["node_id"] for node in shown["nodes"]] == ["s/b", "s/c"]


@pytest.mark.parametrize(
    ("count", "limit", "left_out"),
    [(240, 200, [True, True]), (240, 50, [False] * 5), (50, 200, [False])],
)
def test_all_pages_of_a_run_have_logs_or_none_has(
    toy: Flow, conn: Any, count: int, limit: int, left_out: list[bool]
) -> None:
    run_id = plain_run(toy, conn, count)
    after, found = None, list[bool]()
    while page := history.get_run_page(run_id, after=after, limit=limit):
        found.append(page["logs_left_out"])
        if (after := page["next"]) is None:
            break
    assert found == left_out


def plain_run(toy: Flow, conn: Any, count: int) -> str:
    """Insert a run with `count` nodes, of which the workflow has one."""
    toy.dag(a="")
    run_id = toy.started()
    conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue)"
        " SELECT %s, 'x/' || n, 'ok', 'cpu' FROM generate_series(2, %s) n",
        (run_id, count),
    )
    return run_id


def test_a_page_does_not_begin_behind_a_node_that_the_run_does_not_have(
    toy: Flow, conn: Any
) -> None:
    run_id = plain_run(toy, conn, 5)
    for after in ("s/gone", "", "x/", "x/9", "\0", "\ud800"):
        with pytest.raises(errors.InvalidConfig, match="has no such node"):
            history.get_run_page(run_id, after=after)
    page = history.get_run_page(run_id, after="x/3")
    assert page is not None
    assert [node["node_id"] for node in page["nodes"]] == ["x/4", "x/5"]
    assert history.get_run_page("nope", after="x/3") is None


def test_each_page_of_a_large_run_reads_its_nodes_and_counts_all_once(toy: Flow, conn: Any) -> None:
    run_id = plain_run(toy, conn, 3000)
    after, names, read = None, list[str](), list[int]()
    for _ in range(15):  # the server keeps a plan after ten executions
        with conn.transaction():
            before = factories.one(conn, NODES_READ)
            page = history.get_run_page(run_id, after=after, limit=20, logs=False, conn=conn)
            read.append(factories.one(conn, NODES_READ) - before)
        assert page is not None
        after = page["next"]
        names += [node["node_id"] for node in page["nodes"]]
    assert len({*names}) == len(names) == 15 * 20
    assert max(read) <= 3000 + 3 * 21


NODES_READ = (
    "SELECT coalesce(idx_tup_fetch, 0) + seq_tup_read FROM pg_stat_xact_user_tables"
    " WHERE relname = 'workflow_node_jobs'"
)


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


def test_every_claim_is_an_attempt_with_its_own_end(conn: db.Connection) -> None:
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
    conn: db.Connection,
) -> None:
    job = factories.node(conn)
    assert transitions.end_by_watchdog(conn, transitions.claim_node(conn), seconds=9.0)
    (attempt,) = attempts_of(job["id"])["attempts"]
    assert (attempt["outcome"], attempt["error"], attempt["ran_s"]) == (
        "requeued", "over its budget", 9.0,
    )  # fmt: skip
    kinds = [event["event_type"] for event in attempt["events"]]
    assert kinds == ["claimed", "requeued", "budget_trip"]


def test_an_event_without_a_claim_belongs_to_the_one_before(conn: db.Connection) -> None:
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


def test_without_its_events_an_attempt_is_described_by_the_row(conn: db.Connection) -> None:
    job = factories.node(conn)
    transitions.complete_node(conn, transitions.claim_node(conn))
    conn.execute("DELETE FROM workflow_node_events")
    (attempt,) = attempts_of(job["id"])["attempts"]
    assert (attempt["claim_no"], attempt["outcome"], attempt["host_label"]) == (
        1, "completed", "box",
    )  # fmt: skip
    assert attempt["ended_at"] is not None


def test_an_ingest_job_has_a_history_of_its_own(conn: db.Connection) -> None:
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
    toy.go()
    flow.body({}, name="ok")
    queue_workflows.retry_run(run_id)
    dispatcher.start_run(run_id)
    toy.work()
    first, second = attempts_of(flow.job(run_id, "s/a")["id"])["attempts"]
    assert (first["outcome"], second["outcome"]) == ("failed", "completed")
    assert second["queued_at"] == flow.run(run_id)["queued_at"] > first["ended_at"]


def test_a_page_of_the_feed_begins_behind_the_last_event_of_the_one_before(
    conn: db.Connection,
) -> None:
    for _ in range(2):
        transitions.run_ingest(conn)
    since = factories.one(conn, "SELECT now() - interval '1 hour'")
    found = history.feed(since).events
    assert len(found) >= 2
    for number, event in enumerate(found, 1):
        assert history.feed(since, after=event).events == found[number:]


def test_an_unknown_id_is_none(db: ModuleType) -> None:
    assert history.get_run("nope") is None
    assert history.get_job("nope") is None
