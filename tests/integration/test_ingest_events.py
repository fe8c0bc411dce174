"""The history of ingest jobs: one row per change of state by anyone, and no row is edited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from queue_workflows import db, history, jobs, node_queue
from tests.support import factories, transitions
from tests.support.wait import until

ENDS = {
    "claimed": "running",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "retried": "queued",
    "requeued": "queued",
    "reclaimed": "queued",
}
"""The events of changes of state, and the state in which each leaves the job."""
BLOCKED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock'"
)


@pytest.fixture
def job(conn: Any) -> Any:
    return factories.ingest(conn, id="j", max_attempts=3)


def events(conn: Any, job_id: str = "j") -> list[Any]:
    return conn.execute(
        "SELECT * FROM ingest_job_events WHERE job_id = %s ORDER BY id", (job_id,)
    ).fetchall()


def by_its_claim(act: Callable[..., object], **given: Any) -> Callable[[Any], object]:
    return lambda conn: act(conn, factories.reread(conn, {"id": "j"}), **given)


def plainly(text: str) -> Callable[[Any], object]:
    return lambda conn: conn.execute(f"UPDATE ingest_jobs SET {text} WHERE id = 'j'".encode())


def claim(conn: Any) -> object:
    return transitions.claim(conn, transitions.who("fetch"), 2)


def complete(conn: Any) -> object:
    job = factories.reread(conn, {"id": "j"})
    return transitions.complete_ingest(conn, job) if job["worker_id"] else None


def lapse(conn: Any) -> object:
    transitions.expire(conn, {"id": "j"})
    return transitions.reclaim_lapsed(conn, "ingest")


MOVES: dict[str, Callable[[Any], object]] = {
    "claim": claim,
    "complete": complete,
    "fail": by_its_claim(transitions.fail, after_s=0),
    "fail for good": by_its_claim(transitions.fail, retry=False),
    "hand back": by_its_claim(transitions.hand_back, reason="snoozed"),
    "hand all back": by_its_claim(lambda conn, job: transitions.hand_back_all(conn, [job])),
    "trip": by_its_claim(transitions.record, kind="timed_out", error="too long"),
    "lapse": lapse,
    "strays": lambda conn: transitions.release_strays(conn, "ingest"),
    "requeue": lambda _: node_queue.requeue_running_for_worker("box", "fetch"),
    "cancel": lambda conn: jobs.cancel("j", conn=conn),
    "retry": lambda conn: jobs.retry("j", conn=conn),
    "complete by hand": lambda _: node_queue.mark_ingest_completed("j"),
    "fail by hand": lambda _: node_queue.mark_ingest_failed("j", error="by hand"),
    "SQL claims": plainly("status = 'running', claimed_by = 'old'"),
    "SQL completes": plainly("status = 'completed', finished_at = now()"),
    "SQL fails": plainly("status = 'failed', error = 'e'"),
    "SQL cancels": plainly("status = 'cancelled', finished_at = now()"),
    "SQL asks for the end": plainly("cancel_requested_at = now()"),
    "SQL queues": plainly("status = 'queued', priority = 1"),
    "SQL reopens": plainly("status = 'queued', generation = generation + 1"),
    "SQL touches": plainly("status = status, priority = 5"),
}


STARTS: dict[str, list[str]] = {
    "queued": [],
    "running": ["claim"],
    "asked to end": ["claim", "SQL asks for the end"],
    "running under 0.3.0": ["SQL claims"],
    "queued again": ["claim", "fail"],
    "completed": ["claim", "complete"],
    "failed": ["claim", "fail for good"],
    "cancelled": ["cancel"],
    "cancelled after a claim": ["claim", "SQL cancels"],
}


def made(conn: Any, move: str) -> list[Any]:
    """The events of a move; one that is refused makes none."""
    before = len(events(conn))
    try:
        with conn.transaction():
            MOVES[move](conn)
    except (psycopg.Error, KeyError, ValueError):
        assert len(events(conn)) == before, move
    return events(conn)[before:]


@pytest.mark.parametrize("start", STARTS)
def test_each_change_of_state_leaves_one_row_and_nothing_else_does(conn: Any, start: str) -> None:
    changed = 0
    for move in MOVES:
        factories.empty(conn, "ingest_jobs", "ingest_job_events")
        factories.ingest(conn, id="j", max_attempts=3)
        for step in STARTS[start]:
            MOVES[step](conn)
        old = factories.reread(conn, {"id": "j"})
        found = made(conn, move)
        new = factories.reread(conn, {"id": "j"})
        said = [event for event in found if event["event_type"] in ENDS]
        wanted = [new["status"]] if new["status"] != old["status"] else []
        assert [ENDS[event["event_type"]] for event in said] == wanted, move
        changed += len(wanted)
        asked = new["cancel_requested_at"] and not old["cancel_requested_at"]
        running = old["status"] == new["status"] == "running"
        cancels = [event for event in found if event["event_type"] == "cancel_requested"]
        assert len(cancels) == bool(asked and running), move
        for event in [*said, *cancels]:
            assert event["worker_id"] or event["actor"], move
            assert (event["queue"], event["attempt"]) == ("fetch", new["attempts"]), move
            assert event["claim_no"] == new["claim_no"], move
    assert changed >= (1 if start == "completed" else 2)


@pytest.mark.parametrize("move", ["complete by hand", "fail by hand"])
def test_a_job_that_is_handed_back_meanwhile_leaves_one_row_of_its_end(
    conn: Any, job: Any, move: str
) -> None:
    claim(conn)
    thread = threading.Thread(target=lambda: MOVES[move](None))
    with db.connect() as worker, worker.transaction():
        MOVES["hand back"](worker)
        thread.start()
        until(lambda: factories.one(conn, BLOCKED) == 1)
    thread.join(30)
    new = factories.reread(conn, job)["status"]
    assert [event["event_type"] for event in events(conn)] == ["claimed", "requeued", new]
    assert new in ("completed", "failed")


def test_the_author_of_a_change_is_the_worker_the_login_or_the_sessions_actor(
    conn: Any, job: Any
) -> None:
    claim(conn)
    conn.execute("SELECT set_config('queue_workflows.actor', 'ann@example.org', false)")
    plainly("cancel_requested_at = now()")(conn)
    conn.execute("SELECT set_config('queue_workflows.actor', '', false)")
    lapse(conn)
    login = factories.one(conn, "SELECT session_user::text")
    assert [(e["event_type"], e["worker_id"], e["actor"]) for e in events(conn)] == [
        ("claimed", "w1", None),
        ("cancel_requested", "w1", "ann@example.org"),
        ("cancelled", None, f"{login} (queue_workflows)"),
    ]


def test_a_plain_end_of_a_claim_of_0_3_0_is_recorded_with_its_error(conn: Any, job: Any) -> None:
    plainly("status = 'running', claimed_by = 'old'")(conn)
    plainly("status = 'failed', error = 'no disk', seconds = 2")(conn)
    assert [
        (e["event_type"], e["claim_no"], e["worker_id"], e["error"], e["elapsed_s"])
        for e in events(conn)
    ] == [
        ("claimed", 1, "legacy:old", None, None),
        ("failed", 1, "legacy:old", "no disk", 2.0),
    ]


# --- deleting ------------------------------------------------------------------------------------


def test_a_deleted_job_leaves_what_it_was_and_its_history(conn: Any) -> None:
    factories.ingest(conn, id="j", lock_key="feed", reason="boot")
    claim(conn)
    complete(conn)
    conn.execute("DELETE FROM ingest_jobs")
    *_, last = events(conn)
    assert [event["event_type"] for event in events(conn)] == ["claimed", "completed", "deleted"]
    assert {
        "task_name": "t",
        "status": "completed",
        "lock_key": "feed",
        "reason": "boot",
    }.items() <= (last["detail"].items())
    assert last["detail"]["created_at"] and last["actor"]


def test_retention_of_jobs_leaves_no_deleted_event(conn: Any, job: Any) -> None:
    plainly("status = 'failed', finished_at = now() - interval '100 days'")(conn)
    assert history.prune()["jobs"] == 1
    assert [event["event_type"] for event in events(conn)] == ["failed"]


# --- append-only ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM ingest_job_events",
        "UPDATE ingest_job_events SET actor = 'somebody else'",
        "DELETE FROM ingest_job_events WHERE false",
    ],
)
def test_nobody_edits_the_history(conn: Any, job: Any, statement: str) -> None:
    claim(conn)
    with pytest.raises(psycopg.Error, match="append-only") as caught:
        conn.execute(statement.encode())
    assert caught.value.sqlstate == "QW004"
    assert "NODE_EVENT_RETENTION_DAYS" in (caught.value.diag.message_hint or "")
    with conn.transaction():
        conn.execute("SELECT set_config('queue_workflows.retention', 'on', true)")
        with pytest.raises(psycopg.Error, match="UPDATE is refused"), conn.transaction():
            conn.execute("UPDATE ingest_job_events SET error = 'x'")
    assert len(events(conn)) == 1


def test_retention_deletes_what_is_old_and_only_within_its_transaction(conn: Any) -> None:
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, created_at)"
        " VALUES ('old', 'claimed', now() - interval '31 days'), ('new', 'claimed', now())"
    )
    assert history.prune()["ingest_job_events"] == 1
    assert factories.column(conn, "SELECT job_id FROM ingest_job_events") == ["new"]
    with pytest.raises(psycopg.Error, match="append-only"):
        conn.execute("DELETE FROM ingest_job_events")


# --- rights --------------------------------------------------------------------------------------


def test_a_role_that_may_change_jobs_may_not_write_their_history(conn: Any, job: Any) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE qw_audit_clerk")
        conn.execute("GRANT USAGE ON SCHEMA public TO qw_audit_clerk")
        conn.execute("GRANT SELECT, UPDATE, DELETE ON ingest_jobs TO qw_audit_clerk")
        conn.execute("SET LOCAL ROLE qw_audit_clerk")
        plainly("status = 'cancelled', finished_at = now()")(conn)
        conn.execute("DELETE FROM ingest_jobs")
        for statement in (
            "INSERT INTO ingest_job_events (job_id, event_type) VALUES ('j', 'failed')",
            "SELECT queue_workflows_audit(NULL::ingest_jobs, 'failed')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(statement.encode())
        conn.execute("RESET ROLE")
        assert [event["event_type"] for event in events(conn)] == ["cancelled", "deleted"]


def test_a_trigger_of_ones_own_writes_no_history(conn: Any, job: Any) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE qw_audit_guest")
        conn.execute("GRANT USAGE ON SCHEMA public TO qw_audit_guest")
        conn.execute("SET LOCAL SESSION AUTHORIZATION qw_audit_guest")
        conn.execute("CREATE TEMP TABLE bait (n integer)")
        conn.execute(
            "CREATE FUNCTION pg_temp.forge() RETURNS trigger LANGUAGE plpgsql AS $$"
            " DECLARE made public.ingest_jobs; BEGIN"
            " made.id := 'j'; made.queue := 'load'; made.attempts := 1; made.claim_no := 1;"
            " made.status := 'completed'; made.worker_id := 'another';"
            " PERFORM public.queue_workflows_audit(made, 'completed'); RETURN NEW; END $$"
        )
        conn.execute(
            "CREATE TRIGGER forged BEFORE INSERT ON bait FOR EACH ROW"
            " EXECUTE FUNCTION pg_temp.forge()"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("INSERT INTO bait VALUES (1)")
    assert events(conn) == []


def test_nor_does_one_of_a_role_that_may_insert_jobs_and_call_every_function(
    conn: Any, job: Any
) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute(
            "CREATE ROLE qw_audit_guest; GRANT SELECT, INSERT ON ingest_jobs TO qw_audit_guest;"
            " GRANT USAGE ON SEQUENCE ingest_jobs_seq_seq TO qw_audit_guest;"
            " GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO qw_audit_guest"
        )
        conn.execute("SET LOCAL SESSION AUTHORIZATION qw_audit_guest")
        conn.execute("CREATE TEMP TABLE bait (n integer)")
        conn.execute(
            "CREATE FUNCTION pg_temp.forge() RETURNS trigger LANGUAGE plpgsql AS $$"
            " DECLARE made public.ingest_jobs; BEGIN"
            " INSERT INTO public.ingest_jobs (task_name, queue) VALUES ('t', 'fetch');"
            " made.id := 'j'; made.queue := 'load'; made.attempts := 1; made.claim_no := 1;"
            " made.status := 'completed'; made.worker_id := 'another';"
            " PERFORM public.queue_workflows_audit(made, 'completed'); RETURN NEW; END $$"
        )
        conn.execute(
            "CREATE TRIGGER forged BEFORE INSERT ON bait FOR EACH ROW"
            " EXECUTE FUNCTION pg_temp.forge()"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="ingest_job_events"):
            conn.execute("INSERT INTO bait VALUES (1)")
    assert events(conn) == []


def test_a_claim_of_a_locked_job_by_a_plain_update_is_none_and_leaves_no_row(conn: Any) -> None:
    factories.ingest(conn, lock_key="k")
    factories.ingest(conn, id="j", lock_key="k")
    plainly("status = 'running', claimed_by = 'old'")(conn)
    assert (factories.reread(conn, {"id": "j"})["status"], events(conn)) == ("queued", [])


def test_a_job_that_a_person_ended_has_one_event(conn: Any, job: Any) -> None:
    assert node_queue.mark_ingest_failed("j", error="not needed")
    assert [(e["event_type"], e["error"]) for e in events(conn)] == [("failed", "not needed")]
