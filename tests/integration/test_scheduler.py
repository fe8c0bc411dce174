"""The scheduler queues one job per due time, even if other schedulers run, die or restart."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, scheduler, tasks
from queue_workflows.scheduler import ScheduleEntry, Ticker
from tests.support import factories, wait
from tests.support.clocks import Clock
from tests.support.factories import execute as rows
from tests.support.wait import patience

UTC = timezone.utc
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
TEN = datetime(2024, 5, 1, 10, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _tasks(clean_process: None) -> None:
    for name in ("prices", "check_freshness"):
        config.register_ingest_task(name, lambda reason: {"reason": reason})


def entry(name: str = "prices", minute: int = 5, task: str = "prices", **more: Any):
    return ScheduleEntry(name, minute, task, "fetch", **more)


def fires() -> list[tuple[str, datetime]]:
    found = rows("SELECT * FROM schedule_fires ORDER BY fire_at, name")
    return [(row["name"], row["fire_at"]) for row in found]


def seen_before(db: ModuleType, name: str, fire_at: datetime) -> None:
    with db.connection() as conn:
        conn.execute("INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)", (name, fire_at))


def database_now() -> datetime:
    return rows("SELECT now() AS now")[0]["now"]


# --- the functions that apps call


def test_enqueue_due_queues_each_instant_once(db: ModuleType):
    (job_id,) = scheduler.enqueue_due([entry()])
    assert scheduler.enqueue_due([entry()]) == []
    (job,) = factories.ingest_jobs()
    assert job["id"] == job_id
    assert (job["task_name"], job["queue"], job["reason"]) == ("prices", "fetch", "tick")
    assert (job["args"], job["priority"], job["lock_key"]) == ({}, 100, None)
    now = database_now()
    ((_, fire_at),) = fires()
    assert rows("SELECT job_id FROM schedule_fires") == [{"job_id": job_id}]
    assert now - HOUR - MINUTE < fire_at <= now
    assert fire_at.minute == 5


def test_fires_come_in_one_order_whatever_order_the_schedule_has(db: ModuleType):
    minute = (database_now().astimezone(UTC) - 2 * MINUTE).minute
    five, four = minute, (minute - 1) % 60
    ids = scheduler.enqueue_due([entry("b", five), entry("a", five), entry("c", four)])
    names = {row["job_id"]: row["name"] for row in rows("SELECT * FROM schedule_fires")}
    assert [names[job_id] for job_id in ids] == ["c", "a", "b"]
    assert [job["id"] for job in factories.ingest_jobs()] == ids


def test_schedules_in_opposite_orders_do_not_deadlock(db: ModuleType):
    now = database_now().astimezone(UTC)
    half_past = entry("a", (now - 30 * MINUTE).minute)
    both = [half_past, entry("b", half_past.minute)]
    fire_at = half_past.previous_fire_at(now)
    queued: list[str] = []
    other = threading.Thread(target=lambda: queued.extend(scheduler.enqueue_due(both[::-1])))

    def waits() -> bool:
        query = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return bool(rows(query + " AND datname = current_database()"))

    insert = "INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)"
    try:
        with db.transaction() as conn:
            conn.execute(insert, ("a", fire_at))
            other.start()
            wait.until(waits)
            conn.execute(insert, ("b", fire_at))
    finally:
        other.join(30)
    assert (queued, factories.ingest_jobs()) == ([], [])


def test_a_fire_whose_job_cannot_be_stored_leaves_all_instants_free(db: ModuleType):
    both = [entry("a"), entry("b", task="check_freshness")]
    refusing = "ALTER TABLE ingest_jobs {} CONSTRAINT none"
    with db.connection() as conn:
        conn.execute(refusing.format("ADD") + " CHECK (task_name <> 'check_freshness')")
    try:
        with pytest.raises(db.Error, match='"none"'):
            scheduler.enqueue_due(both)
        assert (fires(), factories.ingest_jobs()) == ([], [])
    finally:
        with db.connection() as conn:
            conn.execute(refusing.format("DROP"))
    assert len(scheduler.enqueue_due(both)) == 2


@pytest.mark.parametrize(
    "bad", [entry("n", task="nope"), ScheduleEntry("q", 5, "prices", "nowhere")]
)
def test_enqueue_due_refuses_unknown_names_before_any_write(db: ModuleType, bad: ScheduleEntry):
    with pytest.raises(ValueError, match=r"nope|nowhere"):
        scheduler.enqueue_due([entry(), bad])
    assert (fires(), factories.ingest_jobs()) == ([], [])


def test_a_fire_takes_the_priority_and_lock_key_of_its_task(db: ModuleType):
    tasks.register_ingest_task("prices", lambda: None, priority=7, lock_key="one")
    scheduler.enqueue_due([entry()])
    assert [(job["priority"], job["lock_key"]) for job in factories.ingest_jobs()] == [(7, "one")]


def test_a_task_that_needs_args_cannot_be_scheduled(db: ModuleType):
    def task(*, day: str) -> None: ...

    tasks.register_ingest_task("prices", task)
    with pytest.raises(ValueError, match=r"schedule 'n': .* 'day' missing"):
        scheduler.enqueue_due([entry("n")])
    assert (fires(), factories.ingest_jobs()) == ([], [])


def test_the_boot_kick_is_one_job_an_entry_and_hour_without_freshness(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PGTZ", "Asia/Kathmandu")
    config.set_ingest_schedule([entry(), entry("fresh", 7, "check_freshness")])
    scheduler.enqueue_due([entry()])
    queued = [scheduler.enqueue_boot_kick() for _ in range(3)]
    # The hour may turn between the calls, once.
    boots = [job for job in factories.ingest_jobs() if job["reason"] == "boot"]
    assert 1 <= len(boots) <= 2
    assert [job["id"] for job in boots] == [job_id for ids in queued for job_id in ids]
    assert {job["task_name"] for job in boots} == {"prices"}
    instants = {at.astimezone(UTC) for name, at in fires() if name == "prices:boot"}
    assert len(instants) == len(boots)
    assert {(at.minute, at.second, at.microsecond) for at in instants} == {(0, 0, 0)}


# --- the ticker


def test_a_restart_fires_nothing_again_and_what_came_due_meanwhile(db: ModuleType):
    clock = Clock(TEN)
    first = Ticker(schedule=[entry()], now_fn=clock)
    first.run_once()
    clock.now = TEN + 5 * MINUTE
    first.run_once()
    clock.now = TEN + 20 * MINUTE
    assert Ticker(schedule=[entry()], now_fn=clock).run_once() == []
    clock.now = TEN + 70 * MINUTE
    assert len(Ticker(schedule=[entry()], now_fn=clock).run_once()) == 1
    assert fires() == [("prices", TEN + 5 * MINUTE), ("prices", TEN + 65 * MINUTE)]


def test_due_is_decided_by_the_databases_clock(db: ModuleType):
    now = database_now().astimezone(UTC)
    passed = now - 2 * MINUTE
    due = entry("due", passed.minute)
    coming = entry("coming", (now + 5 * MINUTE).minute)
    for name in ("due", "coming"):
        seen_before(db, name, now - 50 * MINUTE)
    assert len(Ticker(schedule=[due, coming]).run_once()) == 1
    assert ("due", passed.replace(second=0, microsecond=0)) in fires()


def test_an_unusable_entry_is_logged_once_and_left_out(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    clock = Clock(TEN)
    ticker = Ticker(schedule=[entry("bad", 5, "nope"), entry("good", 5)], now_fn=clock)
    ticker.run_once()
    clock.now = TEN + 6 * MINUTE
    ticker.run_once()
    assert [name for name, _ in fires()] == ["good"]
    assert caplog.text.count("'bad' is left out") == 1


def test_the_ticker_follows_the_configured_schedule_when_it_changes(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    clock = Clock(TEN)
    ticker = Ticker(now_fn=clock)
    ticker.run_once()
    assert ticker.run_once() == []
    assert caplog.text.count("the schedule is empty") == 1
    config.set_ingest_schedule([entry()])
    ticker.run_once()
    clock.now = TEN + 6 * MINUTE
    assert len(ticker.run_once()) == 1


@contextmanager
def running(ticker: Ticker) -> Generator[threading.Thread]:
    thread = threading.Thread(target=ticker.run_forever, name="ticker")
    thread.start()
    try:
        yield thread
    finally:
        ticker.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_stop_ends_a_long_wait_at_once(db: ModuleType):
    now = database_now()
    ticker = Ticker(schedule=[entry(minute=(now + 30 * MINUTE).minute)])
    started = time.monotonic()
    with running(ticker):
        wait.until(lambda: ticker.pause_s() > 20 and rows("SELECT FROM schedules"))
        wait.until(lambda: rows("SELECT FROM schedules WHERE next_at IS NOT NULL"))
    assert time.monotonic() - started < patience(10)


def test_run_forever_sleeps_to_the_instant_but_reads_the_clock_before(db: ModuleType):
    clock = Clock(TEN + 4 * MINUTE + timedelta(seconds=10))
    slept: list[float] = []
    ticker = Ticker(schedule=[entry()], now_fn=clock, sleep_fn=lambda s: advance(s))

    def advance(seconds: float) -> None:
        slept.append(seconds)
        clock.now += timedelta(seconds=seconds)
        if clock.now > TEN + 6 * MINUTE:
            ticker.stop()

    ticker.run_forever()
    assert max(slept) <= scheduler.LOOK_EVERY_S
    ((_, fire_at),) = fires()
    assert fire_at == TEN + 5 * MINUTE
    assert len(slept) < 12


def test_database_errors_are_logged_once_and_waited_out(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    clock = Clock(TEN)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        threading.Event().wait(0.01)

    ticker = Ticker(schedule=[entry()], now_fn=clock, sleep_fn=nap)
    with running(ticker):
        wait.until(lambda: naps)
        with db.connection() as conn:
            conn.execute("ALTER TABLE schedule_fires RENAME TO away")
        try:
            clock.now = TEN + 6 * MINUTE
            count = len(naps)
            wait.until(lambda: len(naps) > count + 5)
        finally:
            with db.connection() as conn:
                conn.execute("ALTER TABLE away RENAME TO schedule_fires")
        wait.until(lambda: fires())
        wait.until(lambda: "continues" in caplog.text)
        with db.connection() as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
                " AND application_name = 'queue_workflows'"
            )
        clock.now = TEN + 66 * MINUTE
        wait.until(lambda: len(fires()) == 2)
    assert caplog.text.count("waits for the database") <= 2
    assert fires() == [("prices", TEN + 5 * MINUTE), ("prices", TEN + 65 * MINUTE)]


# --- processes


def spawn(code_or_args: list[str], **environment: str) -> subprocess.Popen[str]:
    root = str(Path(queue_workflows.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *code_or_args],
        env={**os.environ, "PYTHONPATH": root, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    process.kill()
    output, _ = process.communicate(timeout=30)
    return output


@pytest.fixture
def app(tmp_path: Path) -> Callable[[str], str]:
    def write(schedule: str) -> str:
        (tmp_path / "hostapp.py").write_text(
            "import queue_workflows\n"
            "from queue_workflows.scheduler import ScheduleEntry\n"
            "queue_workflows.register_ingest_task('prices', lambda reason: {})\n"
            f"queue_workflows.set_ingest_schedule([{schedule}])\n"
        )
        return str(tmp_path)

    return write


def started(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}")


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("ScheduleEntry('p', 5, 'prices', 'fetch')", "following 1 schedule entries"),
        ("", "the schedule is empty"),
    ],
)
def test_the_command_runs_until_sigterm(
    db: ModuleType, app: Callable[[str], str], schedule: str, text: str
):
    process = spawn(
        ["-m", "queue_workflows.scheduler", "--app", "hostapp", "--boot-kick"],
        PYTHONPATH=os.pathsep.join([app(schedule), str(Path(queue_workflows.__file__).parents[1])]),
    )
    try:
        started(process, text)
        if schedule:
            wait.until(lambda: [job["reason"] for job in factories.ingest_jobs()] == ["boot"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        rest = end(process)
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("ScheduleEntry('p', 5, 'prices', 'nowhere')", "nowhere"),
        ("ScheduleEntry('p', 5, 'nope', 'fetch')", "nope"),
        ("ScheduleEntry('p', 75, 'prices', 'fetch')", "minute"),
    ],
)
def test_a_schedule_that_cannot_work_is_one_line_and_exit_2(
    db: ModuleType,
    app: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    schedule: str,
    text: str,
):
    monkeypatch.syspath_prepend(app(schedule))
    monkeypatch.delitem(sys.modules, "hostapp", raising=False)
    assert scheduler.main(["--app", "hostapp"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("queue-scheduler: ")
    assert text in lines[0]


def test_sigterm_while_the_schema_is_missing_ends_it(fresh_database: str):
    process = spawn(["-m", "queue_workflows.scheduler"], QUEUE_WORKFLOWS_DB_URL=fresh_database)
    try:
        started(process, "waiting for schema version")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)
