"""The ON/OFF switch: its rows, values refused before a write, and what OFF does to workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import claim_worker, db, errors, node_queue, worker_control, workers
from queue_workflows.types import ExitFn
from tests.support import factories, flow, notifications, wait

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    kept = dict(worker_control.STOP_POLICIES)
    yield
    worker_control.STOP_POLICIES.clear()
    worker_control.STOP_POLICIES.update(kept)


class Worker:
    """What a stop policy is given; it records the calls."""

    host, queue = "box", "gpu"

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self._error = error

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        self.asked.append(("requeue", reason))
        if self._error is not None:
            raise self._error

    def clear_model(self) -> None:
        self.asked.append("clear")


# --- rows


def test_a_switch_is_a_row(conn: Any) -> None:
    row = worker_control.set_worker_control(
        "box", "gpu", desired_state="off", stop_policy="hard", requested_by="me"
    )
    columns = ("host_label", "queue", "desired_state", "stop_policy", "requested_by")
    assert [row[c] for c in columns] == ["box", "gpu", "off", "hard", "me"]
    assert worker_control.get_worker_control("box", "gpu") == row
    assert worker_control.get_worker_control("box", "cpu") is None


def test_a_second_write_replaces_the_first(conn: Any) -> None:
    workers.disable("box", "gpu", by="me")
    row = workers.enable("box", "gpu", by="you")
    assert (row["desired_state"], row["requested_by"]) == ("on", "you")
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 1


def test_the_desired_state_is_on_where_nothing_was_written(conn: Any) -> None:
    assert worker_control.desired_state_for("box", "gpu") == "on"
    workers.disable("box", "gpu")
    assert worker_control.desired_state_for("box", "gpu") == "off"
    assert worker_control.desired_state_for("box", "cpu") == "on"
    assert worker_control.desired_state_for("other", "gpu") == "on"
    workers.enable("box", "gpu")
    assert worker_control.desired_state_for("box", "gpu") == "on"


def test_every_write_wakes_the_worker(db: ModuleType) -> None:
    listener = notifications.NotificationListener()
    try:
        workers.disable("box", "gpu")
        workers.disable("box", "gpu")
        assert listener.heard() == [("worker_control", "box:gpu")] * 2
    finally:
        listener.close()


def test_a_write_joins_the_callers_transaction(db: ModuleType) -> None:
    with db.connection() as mine:
        worker_control.set_worker_control("box", "gpu", desired_state="off", conn=mine)
        mine.rollback()
    assert worker_control.desired_state_for("box", "gpu") == "on"
    with db.connection() as mine:
        worker_control.set_worker_control("box", "gpu", desired_state="off", conn=mine)
    assert worker_control.desired_state_for("box", "gpu") == "off"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"desired_state": "maybe"}, "desired_state 'maybe': it is 'on' or 'off'"),
        ({"desired_state": "off", "stop_policy": "soft"}, "'soft': registered are drain, hard"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_write(
    conn: Any, values: Row, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        workers.set_control("box", "gpu", **values)
    assert isinstance(refusal.value, errors.UnknownPolicy)
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


@pytest.mark.parametrize(
    ("host", "queue"),
    [("\udcff", "gpu"), ("", "gpu"), ("b" * 401, "gpu"), ("box", "a\0"), ("box", "q" * 201)],
)
def test_a_name_that_no_row_can_hold_is_refused(conn: Any, host: str, queue: str) -> None:
    with pytest.raises(errors.UnknownPolicy, match="a name has 1 to"):
        workers.disable(host, queue)
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


def test_an_app_may_register_a_policy_of_its_own(conn: Any) -> None:
    worker_control.STOP_POLICIES["soft"] = lambda worker, *, on_exit: None
    row = workers.disable("box", "gpu", stop_policy="soft")
    assert row["stop_policy"] == "soft"


SOON = datetime(2100, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize("until", [SOON, timedelta(hours=1)])
def test_requester_reason_and_end_are_stored(conn: Any, until: Any) -> None:
    row = workers.disable("box", "gpu", by="me", reason="new card", until=until)
    assert (row["requested_by"], row["reason"]) == ("me", "new card")
    if until is SOON:
        assert row["until_at"] == SOON
    else:
        left = factories.one(
            conn, "SELECT extract(epoch FROM until_at - now())::float8 FROM worker_controls"
        )
        assert 3500 < left <= 3600
    row = workers.enable("box", "gpu", reason="in")
    assert (row["reason"], row["until_at"]) == ("in", None)


def test_an_off_for_longer_than_times_reach_is_refused_before_any_write(conn: Any) -> None:
    with pytest.raises(errors.InvalidConfig, match="a hundred years at most"):
        workers.disable("box", "gpu", until=timedelta.max)
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


def test_an_off_that_would_be_over_is_refused_before_any_write(
    conn: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = datetime(2020, 1, 1, tzinfo=timezone.utc)
    with pytest.raises(errors.InvalidConfig, match="is over by the database's clock"):
        workers.disable("box", "gpu", until=gone)
    argv = ["--queue", "all", "--off", "--host", "box", "--until", "2020-01-01T00:00:00Z"]
    assert worker_control.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("queue-worker-control: until 2020-01-01 00:00:00+00:00: that is over")
    assert said.count("\n") == 1
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


def test_a_plain_off_that_is_over_is_on(conn: Any) -> None:
    conn.execute(
        "INSERT INTO worker_controls (host_label, queue, desired_state, until_at)"
        " VALUES ('box', 'gpu', 'off', now() - interval '1 second')"
    )
    assert worker_control.desired_state_for("box", "gpu") == "on"


PUBLISHED = (
    "INSERT INTO worker_controls (host_label, queue, desired_state, stop_policy, requested_by)"
    " VALUES ('box', 'gpu', %s, 'hard', 'ops') ON CONFLICT (host_label, queue) DO UPDATE"
    " SET desired_state = EXCLUDED.desired_state, updated_at = now()"
)
"""As the README of 0.3.0 has it."""


def test_an_off_by_an_app_that_knows_no_end_is_not_ended_by_an_earlier_one(conn: Any) -> None:
    workers.disable("box", "gpu", until=timedelta(hours=1))
    conn.execute("UPDATE worker_controls SET until_at = now() - interval '1 second'")
    conn.execute(PUBLISHED, ["off"])
    assert worker_control.desired_state_for("box", "gpu") == "off"
    assert factories.one(conn, "SELECT until_at FROM worker_controls") is None


def test_on_takes_the_end_with_it(conn: Any) -> None:
    workers.disable("box", "gpu", until=timedelta(hours=1))
    conn.execute(PUBLISHED, ["off"])
    assert factories.one(conn, "SELECT until_at > now() FROM worker_controls") is True
    conn.execute(PUBLISHED, ["on"])
    conn.execute(PUBLISHED, ["off"])
    assert factories.one(conn, "SELECT until_at FROM worker_controls") is None


def test_an_unchanged_end_written_again_stays(conn: Any) -> None:
    for _ in range(2):
        workers.disable("box", "gpu", until=SOON)
    assert factories.one(conn, "SELECT until_at FROM worker_controls") == SOON


def test_off_with_an_end_ends_by_itself(conn: Any) -> None:
    workers.disable("box", "gpu", until=timedelta(hours=1))
    assert worker_control.desired_state_for("box", "gpu") == "off"
    conn.execute("UPDATE worker_controls SET until_at = now() - interval '1 second'")
    assert worker_control.desired_state_for("box", "gpu") == "on"


@pytest.mark.parametrize(
    "values",
    [
        {"desired_state": "off", "until": datetime(2100, 1, 1)},
        {"desired_state": "off", "until": timedelta(0)},
        {"desired_state": "on", "until": SOON},
    ],
)
def test_an_until_that_makes_no_sense_is_refused(conn: Any, values: Row) -> None:
    with pytest.raises(ValueError, match="until"):
        workers.set_control("box", "gpu", **values)
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


def test_queue_all_counts_for_every_queue_of_its_machine(conn: Any) -> None:
    workers.disable("box", "all", stop_policy="drain")
    for queue in ("cpu", "gpu", "fetch"):
        assert workers.policy_in_force("box", queue) == "drain"
    assert worker_control.desired_state_for("other", "cpu") == "on"
    workers.enable("box", "gpu")
    assert workers.policy_in_force("box", "gpu") == "drain"
    workers.disable("box", "gpu")
    assert workers.policy_in_force("box", "gpu") == "hard"
    workers.enable("box", "all")
    assert workers.policy_in_force("box", "cpu") is None
    assert workers.policy_in_force("box", "gpu") == "hard"


@contextmanager
def renamed(conn: Any, kind: str, name: str) -> Generator[None]:
    """The database has no such table or function."""
    conn.execute(f"ALTER {kind} {name} RENAME TO {name}_away")
    try:
        yield
    finally:
        conn.execute(f"ALTER {kind} {name}_away RENAME TO {name}")


def test_a_database_without_the_table_counts_as_on(conn: Any) -> None:
    with renamed(conn, "TABLE", "worker_controls"):
        assert worker_control.get_worker_control("box", "gpu") is None
        assert worker_control.desired_state_for("box", "gpu") == "on"
        assert workers.policy_in_force("box", "gpu") is None


# --- policies


def test_hard_requeues_clears_and_leaves_with_79() -> None:
    worker, exits = Worker(), list[int]()
    worker_control.STOP_POLICIES["hard"](worker, on_exit=exits.append)
    assert (worker.asked, exits) == ([("requeue", "turned off"), "clear"], [79])
    assert worker_control.EXIT_CONTROL_HARD_STOP == 79


def test_hard_leaves_even_if_the_database_is_away(caplog: pytest.LogCaptureFixture) -> None:
    exits: list[int] = []
    away = Worker(db.OperationalError("gone"))
    worker_control.STOP_POLICIES["hard"](away, on_exit=exits.append)
    assert exits == [79]
    assert "its lease brings it back" in caplog.text


def test_a_policy_in_a_row_that_nobody_registered_is_hard_with_an_error_logged(
    conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute(
        "INSERT INTO worker_controls (host_label, queue, desired_state, stop_policy)"
        " VALUES ('box', 'gpu', 'off', 'soft')"
    )
    assert workers.policy_in_force("box", "gpu") == "soft"
    worker, exits = Worker(), list[int]()
    with caplog.at_level(logging.ERROR):
        assert watcher(worker, exits).check_once()
    assert (worker.asked, exits) == ([("requeue", "turned off"), "clear"], [79])
    assert "stop policy 'soft' is not registered; stopping hard" in caplog.text


def test_the_policy_in_force_is_that_of_an_off_row(conn: Any) -> None:
    worker_control.STOP_POLICIES["drain"] = lambda worker, *, on_exit: None
    assert workers.policy_in_force("box", "gpu") is None
    workers.disable("box", "gpu", stop_policy="drain")
    assert workers.policy_in_force("box", "gpu") == "drain"
    workers.enable("box", "gpu")
    assert workers.policy_in_force("box", "gpu") is None


# --- the watcher


def watcher(worker: Worker, exits: list[int]) -> worker_control.WorkerControlWatcher:
    return worker_control.WorkerControlWatcher(
        worker, host="box", queue="gpu", on_exit=exits.append
    )


def test_the_watcher_stops_its_own_worker_and_no_other(conn: Any) -> None:
    worker, exits = Worker(), list[int]()
    subject = watcher(worker, exits)
    assert subject.check_once() is False
    workers.disable("box", "cpu")
    workers.disable("other", "gpu")
    assert subject.check_once() is False
    workers.disable("box", "gpu")
    assert subject.check_once() is True
    assert exits == [79]


def test_the_watcher_uses_the_policy_of_the_row(conn: Any) -> None:
    seen: list[Any] = []

    def drain(worker: Any, *, on_exit: ExitFn) -> None:
        seen.append(worker)

    worker_control.STOP_POLICIES["drain"] = drain
    worker, exits = Worker(), list[int]()
    workers.disable("box", "gpu", stop_policy="drain")
    assert watcher(worker, exits).check_once() is True
    assert (seen, exits) == ([worker], [])


def test_a_started_watcher_stops_its_worker_when_it_is_turned_off(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "3600")
    left = threading.Event()
    subject = worker_control.WorkerControlWatcher(worker=Worker(), on_exit=lambda _: left.set())
    subject.start()
    try:
        # It listens, and its first check has found nothing.
        listening = "SELECT 1 FROM pg_stat_activity WHERE query ILIKE 'listen%worker_control%'"
        wait.until(lambda: conn.execute(listening).fetchone())
        assert not left.is_set()
        workers.disable("box", "gpu")
        assert left.wait(30)
        with pytest.raises(RuntimeError):
            subject.start()
    finally:
        subject.stop()


def test_a_started_watcher_polls_where_no_notification_comes(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.05")
    left = threading.Event()
    subject = worker_control.WorkerControlWatcher(worker=Worker(), on_exit=lambda _: left.set())
    subject.start()
    try:
        workers.disable("box", "gpu")
        assert left.wait(30)
    finally:
        subject.stop()


def test_a_watcher_needs_to_know_its_queue() -> None:
    worker = Worker()
    worker.queue = ""
    with pytest.raises(ValueError, match="queue"):
        worker_control.WorkerControlWatcher(worker=worker)


def test_the_watcher_can_be_switched_off(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.disable("box", "gpu")
    monkeypatch.setenv("AI_LEADS_DISABLE_WORKER_CONTROL", "1")
    assert watcher(Worker(), []).check_once() is False


def test_a_worker_that_is_off_claims_nothing_until_it_is_on(conn: Any) -> None:
    flow.body({"a": 1})
    factories.node(conn, node_module="body")
    workers.disable("box", "cpu")
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    assert worker.run_once() is False
    assert claim_worker.ClaimWorker(queue="cpu", host="other").run_once() is True
    again = factories.node(conn, node_module="body")
    assert worker.run_once() is False
    workers.enable("box", "cpu")
    assert worker.run_once() is True
    assert factories.reread(conn, again)["status"] == "completed"
    assert node_queue.snapshot()["counts"]["cpu_queued"] == 0


# --- the command


def test_the_command_writes_the_row_and_prints_it(
    db: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--queue", "gpu", "--off", "--host", "box", "--requested-by", "me"]
    assert worker_control.main(argv) == 0
    assert capsys.readouterr().out == "box gpu: off\n"
    row = worker_control.get_worker_control("box", "gpu")
    assert row is not None
    assert (row["desired_state"], row["stop_policy"], row["requested_by"]) == ("off", "hard", "me")
    assert worker_control.main(["--queue", "gpu", "--on", "--host", "box"]) == 0
    assert worker_control.desired_state_for("box", "gpu") == "on"


@pytest.mark.parametrize(
    ("text", "seconds"), [("45m", 2700), ("1.5h", 5400), ("30s", 30), ("2d", 172800)]
)
def test_the_command_takes_reason_and_span(
    conn: Any, capsys: pytest.CaptureFixture[str], text: str, seconds: int
) -> None:
    argv = ["--queue", "all", "--off", "--host", "box", "--policy", "pause", "--reason", "fan"]
    assert worker_control.main([*argv, "--until", text]) == 0
    assert capsys.readouterr().out.startswith("box all: off until ")
    left = factories.one(
        conn, "SELECT extract(epoch FROM until_at - updated_at)::float8 FROM worker_controls"
    )
    assert left == seconds


def test_the_command_takes_an_iso_time_with_its_zone(
    conn: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--queue", "gpu", "--off", "--host", "box", "--until"]
    assert worker_control.main([*argv, "2100-01-01T00:00:00Z"]) == 0
    assert factories.one(conn, "SELECT until_at FROM worker_controls") == SOON
    assert worker_control.main([*argv, "2100-01-01T00:00:00"]) == 2
    for wrong in ("soon", "5 apples", "-m", "9" * 400 + "d"):
        with pytest.raises(SystemExit):
            worker_control.main([*argv, wrong])
    assert "is neither a time span" in capsys.readouterr().err


def test_the_commands_machine_is_this_one(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_LEADS_HOST_LABEL", "here")
    assert worker_control.main(["--queue", "cpu", "--off"]) == 0
    assert worker_control.desired_state_for("here", "cpu") == "off"


def test_the_command_refuses_a_policy_that_nobody_registered(
    conn: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker_control.main(["--queue", "gpu", "--off", "--policy", "soft"]) == 2
    assert "stop policy 'soft': registered are drain, hard, pause" in capsys.readouterr().err
    assert worker_control.main(["--queue", "gpu", "--off", "--policy", "paus"]) == 2
    assert "did you mean 'pause'?" in capsys.readouterr().err
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--queue", "gpu"],
        ["--off"],
        ["--queue", "gpu", "--on", "--off"],
        ["--queue", "gpu", "--up"],
    ],
    ids=" ".join,
)
def test_the_command_needs_a_queue_and_one_state(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        worker_control.main(argv)
    assert refusal.value.code == 2
    assert "usage: queue-worker-control" in capsys.readouterr().err


def test_the_command_reports_an_unreachable_database_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(worker_control, "PATIENCE_S", 0.0)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", f"postgresql://u:secret@/x?host={tmp_path}")
    assert worker_control.main(["--queue", "gpu", "--on"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("queue-worker-control: database x at")
    assert "does not answer" in line
    assert "secret" not in line


def test_the_command_makes_no_embedded_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(tmp_path / "none"))
    assert worker_control.main(["--queue", "gpu", "--off"]) == 2
    assert "there is no embedded server in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_command_refuses_a_queue_that_nobody_knows(
    conn: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--off", "--host", "box"]
    assert worker_control.main(["--queue", "nope", *argv]) == 2
    err = capsys.readouterr().err
    assert "queue 'nope': no worker has ever served it; known are all, cpu, fetch, gpu, load" in err
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0
    assert worker_control.main(["--queue", "fetch", *argv]) == 0


@pytest.mark.parametrize(
    "row",
    [
        "INSERT INTO worker_heartbeats (host_label, queue) VALUES ('far', 'wheat')",
        "INSERT INTO worker_controls (host_label, queue) VALUES ('far', 'wheat')",
        "INSERT INTO workers (worker_id, host_label, queue, pid, state)"
        " VALUES ('far:1', 'far', 'wheat', 1, 'idle')",
    ],
)
def test_the_command_knows_a_queue_that_has_a_row_of_any_machine(conn: Any, row: str) -> None:
    conn.execute(row)
    assert worker_control.main(["--queue", "wheat", "--off", "--host", "box"]) == 0
    assert worker_control.desired_state_for("box", "wheat") == "off"


def test_the_command_reports_a_missing_schema_in_one_line(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    assert worker_control.main(["--queue", "gpu", "--off"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "no schema version" in err
    assert "queue-workflows migrate" in err


def test_a_schema_without_its_functions_is_not_on(conn: Any) -> None:
    workers.disable("h1", "mail")
    with renamed(conn, "FUNCTION", "queue_workflows_off_policy"):
        with pytest.raises(psycopg.errors.UndefinedFunction):
            workers.policy_in_force("h1", "mail")
        with renamed(conn, "TABLE", "worker_controls"):
            assert workers.policy_in_force("h1", "mail") is None
