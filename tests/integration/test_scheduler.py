"""The scheduler queues one job per due time, even if other schedulers run, die or restart."""

from __future__ import annotations

import logging
import os
import random
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
from queue_workflows.engine import schedules
from queue_workflows.scheduler import ScheduleEntry, Ticker
from tests.support import entry_instants, wait
from tests.support.clocks import Clock
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


def rows(db: ModuleType, query: str) -> list[dict[str, Any]]:
    with db.connection() as conn:
        return conn.execute(query).fetchall()


def fires(db: ModuleType) -> list[tuple[str, datetime]]:
    found = rows(db, "SELECT * FROM schedule_fires ORDER BY fire_at, name")
    return [(row["name"], row["fire_at"]) for row in found]


def jobs(db: ModuleType) -> list[dict[str, Any]]:
    return rows(db, "SELECT * FROM ingest_jobs ORDER BY seq")


def seen_before(db: ModuleType, name: str, fire_at: datetime) -> None:
    with db.connection() as conn:
        conn.execute("INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)", (name, fire_at))


# --- the claim of an instant


def fire(conn: Any, **more: Any) -> str | None:
    given: dict[str, Any] = {
        "name": "x", "fire_at": TEN, "task_name": "prices", "queue": "fetch", "reason": "tick"
    }  # fmt: skip
    return schedules.fire(conn, **(given | more))


def test_an_instant_is_claimed_once_together_with_its_job(db: ModuleType):
    with db.transaction() as conn:
        job_id = fire(conn, args={"a": [1]})
    with db.transaction() as conn:
        assert fire(conn) is None
        assert fire(conn, fire_at=TEN + HOUR) is not None
        assert fire(conn, name="y") is not None

    first = jobs(db)[0]
    assert first["id"] == job_id
    assert (first["status"], first["reason"], first["args"]) == ("queued", "tick", {"a": [1]})
    assert len(jobs(db)) == 3
    stored = rows(db, "SELECT job_id FROM schedule_fires WHERE name = 'x' ORDER BY fire_at LIMIT 1")
    assert stored[0]["job_id"] == job_id


def test_a_rolled_back_claim_leaves_the_instant_free(db: ModuleType):
    def claim_and_fail() -> None:
        with db.transaction() as conn:
            assert fire(conn) is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        claim_and_fail()
    assert (fires(db), jobs(db)) == ([], [])
    with db.transaction() as conn:
        assert fire(conn) is not None


def test_last_fires_and_prune(db: ModuleType):
    for hours in range(3):
        seen_before(db, "a", TEN + hours * HOUR)
    with db.transaction() as conn:
        last = schedules.last_fires(conn, ["a", "never"], until=TEN + 2 * HOUR)
        assert last == {"a": TEN + 2 * HOUR}
        assert schedules.last_fires(conn, ["a"], until=TEN + 119 * MINUTE) == {"a": TEN + HOUR}
        assert schedules.prune(conn, older_than_days=30) == 0
        conn.execute("UPDATE schedule_fires SET created_at = now() - interval '31 days'")
        assert schedules.prune(conn, older_than_days=30, batch=2) == 2
        assert schedules.prune(conn, older_than_days=30, batch=2) == 1


# --- the functions that apps call


def test_enqueue_due_queues_each_instant_once(db: ModuleType):
    (job_id,) = scheduler.enqueue_due([entry()])
    assert scheduler.enqueue_due([entry()]) == []
    (job,) = jobs(db)
    assert job["id"] == job_id
    assert (job["task_name"], job["queue"], job["reason"]) == ("prices", "fetch", "tick")
    with db.transaction() as conn:
        now = schedules.database_now(conn)
    ((_, fire_at),) = fires(db)
    assert now - HOUR - MINUTE < fire_at <= now
    assert fire_at.minute == 5


def test_schedules_in_opposite_orders_do_not_deadlock(db: ModuleType):
    with db.transaction() as conn:
        now = schedules.database_now(conn).astimezone(UTC)
    half_past = entry("a", (now - 30 * MINUTE).minute)
    both = [half_past, entry("b", half_past.minute)]
    fire_at = half_past.previous_fire_at(now)
    queued: list[str] = []
    other = threading.Thread(target=lambda: queued.extend(scheduler.enqueue_due(both[::-1])))

    def waits() -> bool:
        query = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return bool(rows(db, query + " AND datname = current_database()"))

    try:
        with db.transaction() as conn:
            assert fire(conn, name="a", fire_at=fire_at) is not None
            other.start()
            wait.until(waits)
            assert fire(conn, name="b", fire_at=fire_at) is not None
    finally:
        other.join(10)
    assert queued == []
    assert len(jobs(db)) == 2


@pytest.mark.parametrize(
    "bad", [entry("n", task="nope"), ScheduleEntry("q", 5, "prices", "nowhere")]
)
def test_enqueue_due_refuses_unknown_names_before_any_write(db: ModuleType, bad: ScheduleEntry):
    with pytest.raises(ValueError, match=r"nope|nowhere"):
        scheduler.enqueue_due([entry(), bad])
    assert (fires(db), jobs(db)) == ([], [])


def test_a_fire_takes_the_priority_and_lock_key_of_its_task(db: ModuleType):
    tasks.register_ingest_task("prices", lambda: None, priority=7, lock_key="one")
    scheduler.enqueue_due([entry()])
    assert [(job["priority"], job["lock_key"]) for job in jobs(db)] == [(7, "one")]


def test_a_task_that_needs_args_cannot_be_scheduled(db: ModuleType):
    def task(*, day: str) -> None: ...

    tasks.register_ingest_task("prices", task)
    with pytest.raises(ValueError, match=r"entry 'n': it sends no args, and .* 'day' missing"):
        scheduler.enqueue_due([entry("n")])
    assert (fires(db), jobs(db)) == ([], [])


def test_the_boot_kick_is_one_job_an_entry_and_hour_without_freshness(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PGTZ", "Asia/Kathmandu")
    config.set_ingest_schedule([entry(), entry("fresh", 7, "check_freshness")])
    scheduler.enqueue_due([entry()])
    queued = [scheduler.enqueue_boot_kick() for _ in range(3)]
    # The hour may turn between the calls, once.
    boots = [job for job in jobs(db) if job["reason"] == "boot"]
    assert 1 <= len(boots) <= 2
    assert [job["id"] for job in boots] == [job_id for ids in queued for job_id in ids]
    assert {job["task_name"] for job in boots} == {"prices"}
    instants = {at.astimezone(UTC) for name, at in fires(db) if name == "prices:boot"}
    assert len(instants) == len(boots)
    assert {(at.minute, at.second, at.microsecond) for at in instants} == {(0, 0, 0)}


# --- the ticker


def test_a_new_entry_waits_for_its_next_instant(db: ModuleType):
    clock = Clock(TEN + 30 * MINUTE)
    ticker = Ticker(schedule=[entry()], now_fn=clock)
    assert ticker.run_once() == []
    clock.now = TEN + 64 * MINUTE
    assert ticker.run_once() == []
    clock.now = TEN + 65 * MINUTE
    assert len(ticker.run_once()) == 1
    assert ticker.run_once() == []
    assert fires(db) == [("prices", TEN + 65 * MINUTE)]


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
    assert fires(db) == [("prices", TEN + 5 * MINUTE), ("prices", TEN + 65 * MINUTE)]


def test_an_outage_of_hours_costs_one_late_fire(db: ModuleType):
    clock = Clock(TEN)
    ticker = Ticker(schedule=[entry(), entry("daily", 30, hours={11})], now_fn=clock)
    ticker.run_once()
    clock.now = TEN + 4 * HOUR
    ticker.run_once()
    assert fires(db) == [("prices", TEN + 3 * HOUR + 5 * MINUTE)]


def test_a_clock_that_steps_back_and_forth_fires_nothing_twice_and_goes_on(db: ModuleType):
    clock = Clock(TEN)
    ticker = Ticker(schedule=[entry()], now_fn=clock)
    for minutes in (0, 5, -55, -50, 5, 6, 66, 5, 6, 66, 125):
        clock.now = TEN + minutes * MINUTE
        ticker.run_once()
    assert fires(db) == [("prices", TEN + at * MINUTE) for at in (5, 65, 125)]
    assert len(jobs(db)) == 3


def test_what_came_due_while_the_clock_was_ahead_fires_when_it_is_put_right(db: ModuleType):
    seen_before(db, "prices", TEN - 55 * MINUTE)
    clock = Clock(TEN)
    ticker = Ticker(schedule=[entry()], now_fn=clock)
    for minutes in (0, 126, 10, 66, 127):
        clock.now = TEN + minutes * MINUTE
        ticker.run_once()
    assert [job["reason"] for job in jobs(db)] == ["tick"] * 3
    assert fires(db)[1:] == [("prices", TEN + at * MINUTE) for at in (5, 65, 125)]


def test_a_clock_that_was_days_ahead_does_not_stop_the_ticker(db: ModuleType):
    clock = Clock(TEN + 72 * HOUR)
    ticker = Ticker(schedule=[entry()], now_fn=clock)
    ticker.run_once()
    clock.now = TEN
    ticker.run_once()
    clock.now = TEN + 5 * MINUTE
    assert len(ticker.run_once()) == 1


def test_due_is_decided_by_the_databases_clock(db: ModuleType):
    with db.transaction() as conn:
        now = schedules.database_now(conn).astimezone(UTC)
    passed = now - 2 * MINUTE
    due = entry("due", passed.minute)
    coming = entry("coming", (now + 5 * MINUTE).minute)
    for name in ("due", "coming"):
        seen_before(db, name, now - 50 * MINUTE)
    assert len(Ticker(schedule=[due, coming]).run_once()) == 1
    assert ("due", passed.replace(second=0, microsecond=0)) in fires(db)


def test_an_unusable_entry_is_logged_once_and_left_out(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    clock = Clock(TEN)
    ticker = Ticker(schedule=[entry("bad", 5, "nope"), entry("good", 5)], now_fn=clock)
    ticker.run_once()
    clock.now = TEN + 6 * MINUTE
    ticker.run_once()
    assert [name for name, _ in fires(db)] == ["good"]
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
        thread.join(10)
        assert not thread.is_alive()


def test_stop_ends_a_long_wait_at_once(db: ModuleType):
    with db.transaction() as conn:
        now = schedules.database_now(conn)
    ticker = Ticker(schedule=[entry(minute=(now + 30 * MINUTE).minute)])
    started = time.monotonic()
    with running(ticker):
        wait.until(lambda: ticker.pause_s() > 20 and rows(db, "SELECT FROM schedules"))
        wait.until(lambda: rows(db, "SELECT FROM schedules WHERE next_at IS NOT NULL"))
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
    ((_, fire_at),) = fires(db)
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
        wait.until(lambda: fires(db))
        wait.until(lambda: "continues" in caplog.text)
        with db.connection() as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
                " AND application_name = 'queue_workflows'"
            )
        clock.now = TEN + 66 * MINUTE
        wait.until(lambda: len(fires(db)) == 2)
    assert caplog.text.count("waits for the database") <= 2
    assert fires(db) == [("prices", TEN + 5 * MINUTE), ("prices", TEN + 65 * MINUTE)]


def test_tickers_beside_each_other_fire_each_instant_once(db: ModuleType):
    schedule = [entry(f"e{minute}", minute) for minute in range(0, 60, 10)]
    clocks = [Clock(TEN - MINUTE) for _ in range(3)]
    barrier = threading.Barrier(3)

    def tick(number: int) -> None:
        order = random.Random(number).sample(schedule, len(schedule))
        ticker = Ticker(schedule=order, now_fn=clocks[number])
        for _ in range(13):
            barrier.wait(30)
            ticker.run_once()
            clocks[number].now += 10 * MINUTE

    threads = [threading.Thread(target=tick, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [
        (due.name, fire_at)
        for due, fire_at in entry_instants.between(schedule, TEN - MINUTE, TEN + 119 * MINUTE)
    ]
    assert fires(db) == expected
    assert len(jobs(db)) == len(expected) == 12


# --- processes

SPEED = 300.0

FAST_SCHEDULER = """
import sys, time
from datetime import datetime, timedelta
from queue_workflows import config, scheduler
base, since, speed = datetime.fromisoformat(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
config.register_ingest_task("prices", lambda reason: {})
scheduler.Ticker(
    schedule=[scheduler.ScheduleEntry(f"m{m}", m, "prices", "fetch") for m in range(60)],
    now_fn=lambda: base + timedelta(seconds=(time.monotonic() - since) * speed),
    sleep_fn=lambda seconds: time.sleep(seconds / speed),
).run_forever()
"""


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
    output, _ = process.communicate(timeout=10)
    return output


def test_three_schedulers_under_kill_and_restart_fire_each_instant_once(db: ModuleType):
    chance = random.Random(7)
    for minute in range(60):
        seen_before(db, f"m{minute}", TEN - HOUR + minute * MINUTE)
    since = time.monotonic()
    args = ["-c", FAST_SCHEDULER, TEN.isoformat(), str(since), str(SPEED)]
    alive = [spawn(args) for _ in range(3)]
    said: list[str] = []
    try:
        wait.until(lambda: jobs(db), timeout_s=30)
        for _ in range(4):
            said.append(end(alive.pop(chance.randrange(3))))
            alive.append(spawn(args))
            least = len(jobs(db)) + 5
            wait.until(lambda least=least: len(jobs(db)) >= least, timeout_s=30)
    finally:
        said += [end(process) for process in alive]
    assert "".join(said).strip() == ""
    fired = fires(db)[60:]
    schedule = [entry(f"m{minute}", minute) for minute in range(60)]
    due = entry_instants.between(schedule, fired[0][1] - MINUTE, fired[-1][1])
    expected = [(one.name, fire_at) for one, fire_at in due]
    # The last kill may have undone a batch of earlier instants than another had fired.
    ticker = Ticker(schedule=schedule, now_fn=lambda: fired[-1][1])

    def caught_up() -> bool:
        ticker.run_once()
        return fires(db)[60:] == expected

    wait.until(caught_up, timeout_s=30)
    assert len({job["id"] for job in jobs(db)}) == len(expected) == len(jobs(db))


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
            wait.until(lambda: [job["reason"] for job in jobs(db)] == ["boot"])
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
