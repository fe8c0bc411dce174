"""`queue-workflows cancel`: waiting jobs end, running ones get a stop request; its exit codes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queue_workflows import db, jobs
from tests.support import console, factories, flow, notifications, transitions
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("invariants_hold")


def cancelled(any_id: str) -> Any:
    return console.reply("cancel", any_id)


def known_worker(conn: Any, job: dict[str, Any]) -> None:
    factories.insert(
        conn, "workers", worker_id=job["worker_id"], host_label="box", queue=job["queue"], pid=77
    )


# --- runs


def test_a_run_is_cancelled_with_what_waits_and_names_what_still_runs(
    toy: flow.Flow, conn: Any
) -> None:
    toy.dag(a="", x="", b="a")
    run_id = toy.started()
    job = transitions.claim_node(conn)
    known_worker(conn, job)
    done = cancelled(run_id)
    assert [done[k] for k in ("kind", "outcome", "status")] == ["run", "cancelled", "cancelled"]
    assert done["nodes"] == {"running": 1, "cancelled": 1}
    (left,) = done["stopping"]
    assert (left["job_id"], left["name"], left["pid"]) == (job["id"], "s/a", 77)
    assert (left["worker_id"], left["host_label"], left["queue"]) == ("w1", "box", "cpu")


def test_of_a_finished_run_only_the_status_is_printed(toy: flow.Flow) -> None:
    toy.dag(a="")
    run_id = toy.submit()
    toy.go()
    done = cancelled(run_id)
    assert (done["outcome"], done["status"], flow.status(run_id)) == (
        "already over", "completed", "completed",
    )  # fmt: skip


def test_an_app_row_of_another_status_is_cancelled_as_well(conn: Any) -> None:
    run_id = factories.run(conn, mode="step", status="rendering")
    assert cancelled(run_id)["outcome"] == "cancelled"


# --- jobs


def test_a_waiting_node_takes_its_run_with_it(toy: flow.Flow) -> None:
    toy.dag(a="", x="")
    run_id = toy.started()
    done = cancelled(flow.job(run_id, "s/a")["id"])
    assert (done["kind"], done["outcome"], done["run_status"]) == (
        "node job", "cancelled", "cancelled",
    )  # fmt: skip
    assert flow.states(run_id) == {"s/a": "cancelled", "s/x": "cancelled"}


def test_a_running_node_gets_a_stop_request(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    job = transitions.claim_node(conn)
    done = cancelled(job["id"])
    assert (done["outcome"], done["status"], done["run_status"]) == (
        "asked to stop", "running", "cancelled",
    )  # fmt: skip
    assert [left["job_id"] for left in done["stopping"]] == [job["id"]]
    assert flow.job(run_id, "s/a")["cancel_requested_at"] is not None


def test_a_waiting_ingest_job_ends_at_once(conn: Any) -> None:
    job = factories.ingest(conn)
    done = cancelled(job["id"])
    assert [done[k] for k in ("kind", "name", "outcome")] == ["ingest job", "t", "cancelled"]
    row = factories.reread(conn, job)
    assert (row["status"], row["finished_at"] is not None) == ("cancelled", True)
    events = "SELECT event_type FROM ingest_job_events WHERE job_id = %s"
    assert factories.column(conn, events, job["id"]) == ["cancelled"]
    assert cancelled(job["id"])["outcome"] == "already over"


def test_a_running_ingest_job_gets_a_stop_request_and_its_worker_is_notified(conn: Any) -> None:
    factories.ingest(conn)
    job = transitions.claim_ingest(conn)
    known_worker(conn, job)
    hearing = notifications.NotificationListener()
    done = cancelled(job["id"])
    assert ("job_cancel", job["id"]) in hearing.heard()
    hearing.close()
    assert (done["outcome"], done["stopping"][0]["pid"]) == ("asked to stop", 77)
    row = factories.reread(conn, job)
    assert (row["status"], row["worker_id"]) == ("running", job["worker_id"])
    assert row["cancel_requested_at"] is not None
    transitions.hand_back(conn, job, reason="asked")
    assert factories.reread(conn, job)["status"] == "cancelled"


@pytest.mark.parametrize("family", ["node", "ingest"])
def test_a_job_that_is_handed_back_meanwhile_is_cancelled_too(conn: Any, family: str) -> None:
    if family == "node":
        factories.node(conn)
        job = transitions.claim_node(conn)
    else:
        factories.ingest(conn)
        job = transitions.claim_ingest(conn)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(jobs.cancel(job["id"])))
    with db.connect() as worker, worker.transaction():
        assert transitions.hand_back(worker, job)
        thread.start()
        until(lambda: factories.one(conn, _BLOCKED) == 1)
    thread.join(30)
    assert found[0] is not None
    assert factories.reread(conn, job)["status"] == "cancelled"


_BLOCKED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock'"
)


# --- ids


@pytest.mark.parametrize("any_id", ["nope", "", "a'b", "\udcff"])
def test_an_unknown_id_has_its_own_answer(conn: Any, any_id: str) -> None:
    done = cancelled(any_id)
    assert (done["outcome"], done["kind"], done["stopping"]) == ("unknown", None, [])


def test_an_id_of_a_run_and_of_a_job_is_the_runs(conn: Any) -> None:
    factories.run(conn, id="same")
    job = factories.ingest(conn, id="same")
    assert cancelled("same")["kind"] == "run"
    assert factories.reread(conn, job)["status"] == "queued"
