"""Rows of `schedules`: each instant fires once, by its policies, even if schedulers die."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from psycopg import sql

import queue_workflows
from queue_workflows import config, errors, scheduler, schedules
from queue_workflows.schedule import timetable
from queue_workflows.scheduler import Ticker
from tests.support import factories, tabled, timeouts, wait
from tests.support.clocks import Clock
from tests.support.factories import execute as rows

UTC = timezone.utc
TEN = datetime(2024, 5, 1, 10, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
Schedule = timetable.Schedule


@pytest.fixture(autouse=True)
def _tasks(clean_process: None) -> None:
    for name in ("prices", "other"):
        config.register_ingest_task(name, lambda reason, args: {"reason": reason})


def hourly(name: str = "s", expression: str = "5 * * * *", **more: Any) -> Schedule:
    given: dict[str, Any] = {"task_name": "prices", "queue": "fetch", **more}
    return Schedule(name, expression, **given)


def put(clock: Clock[datetime], *wanted: Schedule) -> Ticker:
    """A ticker that has planned these schedules of the code at the clock's time."""
    config.set_ingest_schedule(wanted)
    ticker = Ticker(now_fn=clock)
    ticker.run_once()
    with queue_workflows.db.connection() as conn:
        conn.execute(
            "UPDATE schedules SET changed_at = %s, next_at = NULL, wake_at = NULL", (clock.now,)
        )
    ticker.run_once()
    return ticker


def fires() -> list[tuple[str, float, str | None]]:
    """Name, minutes after ten, and why the instant queued nothing."""
    found = rows("SELECT * FROM schedule_fires ORDER BY fire_at, name")
    return [(r["name"], (r["fire_at"] - TEN) / MINUTE, r["skipped"]) for r in found]


def finish() -> None:
    """End every job."""
    with queue_workflows.db.connection() as conn:
        conn.execute(
            "UPDATE ingest_jobs SET status = 'cancelled', finished_at = now()"
            " WHERE status = 'queued'"
        )


def after(ticker: Ticker, clock: Clock[datetime], *minutes: float) -> list[str]:
    found: list[str] = []
    for at in minutes:
        clock.now = TEN + at * MINUTE
        found += ticker.run_once()
    return found


# --- one fire for each instant


def test_a_new_schedule_waits_for_its_next_instant_and_fires_it_once(db: ModuleType):
    clock = Clock(TEN + 30 * MINUTE)
    ticker = put(clock, hourly(args={"a": 1}, headers={"x": "y"}, priority=7))
    assert after(ticker, clock, 64.9) == []
    (made,) = after(ticker, clock, 65, 65.5)
    assert fires() == [("s", 65, None)]
    (job,) = factories.ingest_jobs()
    assert (job["id"], job["task_name"], job["priority"], job["args"]) == (
        made, "prices", 7, {"a": 1}
    )  # fmt: skip
    assert job["headers"] == {"x": "y", "schedule": "s", "fire_at": "2024-05-01T11:05:00+00:00"}


def test_what_is_due_fires_the_earliest_first_and_then_by_name(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly("b"), hourly("a"), hourly("c", "4 * * * *"))
    ids = after(ticker, clock, 6)
    names = {row["job_id"]: row["name"] for row in rows("SELECT * FROM schedule_fires")}
    assert [names[job_id] for job_id in ids] == ["c", "a", "b"]
    assert [job["id"] for job in factories.ingest_jobs()] == ids


def test_three_schedulers_that_race_fire_each_instant_once(db: ModuleType):
    clock = Clock(TEN)
    wanted = [hourly(f"s{n}", f"{n} * * * *", overlap="allow") for n in range(0, 60, 5)]
    put(clock, *wanted)
    tickers = [Ticker(now_fn=clock) for _ in range(3)]
    barrier = threading.Barrier(4)

    def race(ticker: Ticker) -> None:
        for _ in range(10):
            barrier.wait(30)
            ticker.run_once()
            barrier.wait(30)

    threads = [threading.Thread(target=race, args=(one,)) for one in tickers]
    for thread in threads:
        thread.start()
    for step in range(1, 11):
        clock.now = TEN + step * 6 * MINUTE
        barrier.wait(30)
        barrier.wait(30)
    for thread in threads:
        thread.join(60)
    after(tickers[0], clock, 60.5)
    due = [(f"s{n}", float(n or 60), None) for n in range(0, 60, 5)]
    assert fires() == sorted(due, key=lambda one: (one[1], one[0]))
    assert len(factories.ingest_jobs()) == len(due)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from queue_workflows import config, scheduler
config.register_ingest_task("prices", lambda: None)
scheduler.Ticker(schedule=None).run_forever()
"""


GATE = """
CREATE FUNCTION test_gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$;
CREATE TRIGGER zz_gate BEFORE {event} FOR EACH ROW EXECUTE FUNCTION test_gate();
"""


@pytest.mark.parametrize(
    "event",
    [
        "INSERT ON schedule_fires",
        "INSERT ON ingest_jobs",
        "UPDATE OF job_id ON schedule_fires",
        "UPDATE OF last_fire_at ON schedules",
        "UPDATE OF next_at ON schedules",
    ],
)
def test_a_scheduler_that_is_killed_in_a_fire_loses_and_doubles_nothing(db: ModuleType, event: str):
    schedules.add("s", "every 1h", task_name="prices", queue="fetch")
    with db.connection() as conn:
        conn.execute("UPDATE schedules SET next_at = date_trunc('hour', now()), wake_at = now()")
        conn.execute(GATE.format(event=event))
    waiting = "SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
    child: subprocess.Popen[bytes] | None = None
    try:
        with db.transaction() as conn:
            conn.execute("SELECT pg_advisory_xact_lock(4711)")
            child = subprocess.Popen([sys.executable, "-c", KILLED, str(Path.cwd())])
            (blocked,) = wait.until(lambda: rows(waiting))
            child.kill()
            child.wait(30)
        alive = f"SELECT FROM pg_stat_activity WHERE pid = {blocked['pid']}"
        wait.until(lambda: not rows(alive))
    finally:
        if child is not None:
            child.kill()
            child.wait(30)
        with db.connection() as conn:
            conn.execute("DROP FUNCTION test_gate CASCADE")
    assert (fires(), factories.ingest_jobs()) == ([], [])
    queued = [made for ticker in (Ticker(), Ticker()) for made in ticker.run_once()]
    assert [job["id"] for job in factories.ingest_jobs()] == queued
    assert len(queued) == len(fires()) == 1


# --- outages, clocks


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({"catch_up": "none"}, []),
        ({"catch_up": "last"}, [605]),
        ({"catch_up": "all", "overlap": "allow"}, [65 + 60 * n for n in range(10)]),
        ({"catch_up": "all", "overlap": "allow", "catch_up_max": 3}, [485, 545, 605]),
        ({"catch_up": "all", "overlap": "allow", "catch_up_within_s": 7200.0}, [545, 605]),
        ({"catch_up": "all", "overlap": "skip", "catch_up_max": 2}, [545, (605, "overlap")]),
    ],
)
def test_what_an_outage_missed_fires_by_the_policy(
    db: ModuleType, policy: dict[str, Any], wanted: list[Any]
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(**policy))
    after(ticker, clock, 5)
    finish()
    restarted = Ticker(now_fn=clock)
    after(restarted, clock, 640, 640.5)
    found = [at if skipped is None else (at, skipped) for _, at, skipped in fires()]
    assert found == [5, *wanted]
    finish()
    assert len(after(restarted, clock, 665)) == 1


def test_a_restart_within_the_grace_still_fires_without_catching_up(db: ModuleType):
    clock = Clock(TEN)
    put(clock, hourly(catch_up="none"))
    assert len(after(Ticker(now_fn=clock), clock, 5.9)) == 1


def test_a_clock_that_steps_an_hour_back_and_forth_fires_nothing_twice(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="allow"))
    after(ticker, clock, 0, 5, -55, -50, 5, 6, 66, 5, 6, 66, 125)
    assert fires() == [("s", at, None) for at in (5, 65, 125)]
    assert len(factories.ingest_jobs()) == 3


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_was_days_ahead_does_not_stop_a_schedule(db: ModuleType, restart: bool):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="allow"))
    after(ticker, clock, 3 * 1440)
    ticker = Ticker(now_fn=clock) if restart else ticker
    after(ticker, clock, 10, 64)
    assert len(after(ticker, clock, 65)) == 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_was_ahead_when_the_overlap_held_an_instant_back_stops_nothing(
    db: ModuleType, restart: bool
):
    clock = Clock(TEN)
    ticker = put(clock, hourly())
    after(ticker, clock, 5, 3 * 1440)
    ticker = Ticker(now_fn=clock) if restart else ticker
    finish()
    after(ticker, clock, 10, 65)
    assert fires() == [("s", 5, None), ("s", 65, None), ("s", 3 * 1440 - 55, "overlap")]


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_was_ahead_leaves_no_missed_instant(
    db: ModuleType, caplog: pytest.LogCaptureFixture, restart: bool
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(catch_up="none"))
    after(ticker, clock, 5, 130)
    finish()
    assert (
        "missed its instants from 2024-05-01T11:05:00+00:00 to 2024-05-01T12:05:00" in caplog.text
    )
    caplog.clear()
    ticker = Ticker(now_fn=clock) if restart else ticker
    after(ticker, clock, 20, 21)
    assert "missed" not in caplog.text and not schedules.list()[0]["missed"]
    assert len(after(ticker, clock, 65)) == 1


def test_a_clock_that_was_behind_reports_no_instant_that_has_fired(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(catch_up="none", overlap="allow"))
    after(ticker, clock, 5, 65, 20, 70)
    assert "missed" not in caplog.text
    assert fires() == [("s", 5, None), ("s", 65, None)]


def test_a_clock_that_steps_back_fires_nothing_that_catch_up_left_out(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(catch_up="all", catch_up_max=2, overlap="allow"))
    after(ticker, clock, 5, 306, 366, 250, 251)
    assert [at for _, at, _ in fires()] == [5, 245, 305, 365]


@pytest.mark.parametrize("restart", [False, True])
def test_an_instant_that_waits_for_a_job_does_not_wait_for_a_clock_that_was_ahead(
    db: ModuleType, restart: bool
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="queue"))
    after(ticker, clock, 5, 65, 600)
    ticker = Ticker(now_fn=clock) if restart else ticker
    after(ticker, clock, 70)
    finish()
    assert len(after(ticker, clock, 71)) == 1
    assert [at for _, at, _ in fires()] == [5, 65]


def test_a_long_sleep_of_the_machine_costs_one_late_fire(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(expression="* * * * * *", overlap="allow"))
    (_,) = after(ticker, clock, 600)
    assert fires() == [("s", 600, None)]


def test_a_transaction_fires_fifty_schedules_at_most(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, *[hourly(f"s{number}") for number in range(60)])
    after(ticker, clock, 5, 5, 5)
    found = rows("SELECT count(*) AS n FROM schedule_fires GROUP BY created_at")
    assert sum(row["n"] for row in found) == 60
    assert max(row["n"] for row in found) <= 50


# --- overlap


def test_skip_records_the_instant_and_goes_on_when_the_job_is_over(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly())
    after(ticker, clock, 5, 65)
    finish()
    after(ticker, clock, 125)
    assert fires() == [("s", 5, None), ("s", 65, "overlap"), ("s", 125, None)]
    assert len(factories.ingest_jobs()) == 2


def test_replace_cancels_the_job_before(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="replace"))
    after(ticker, clock, 5, 65)
    assert [job["status"] for job in factories.ingest_jobs()] == ["cancelled", "queued"]


def test_replace_cancels_the_run_before(db: ModuleType):
    clock = Clock(TEN)
    nightly = Schedule("w", "5 * * * *", workflow_name="nightly", overlap="replace")
    ticker = put(clock, nightly)
    after(ticker, clock, 5, 65)
    found = rows("SELECT status FROM workflow_runs ORDER BY created_at")
    assert [row["status"] for row in found] == ["cancelled", "queued"]


def test_queue_lets_one_instant_wait_until_the_job_is_over(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="queue"))
    after(ticker, clock, 5, 65, 66, 125, 140)
    assert fires() == [("s", 5, None)]
    finish()
    assert len(after(ticker, clock, 141)) == 1
    assert fires() == [("s", 5, None), ("s", 125, None)]
    finish()
    assert len(after(ticker, clock, 185)) == 1


def test_an_idempotency_key_that_another_job_has_queues_nothing(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(
        clock,
        hourly("one", overlap="allow", idempotency_key="k"),
        hourly("each", overlap="allow", idempotency_key="e {fire_at}"),
    )
    after(ticker, clock, 5, 65)
    assert fires() == [
        ("each", 5, None), ("one", 5, None), ("each", 65, None), ("one", 65, "idempotency key"),
    ]  # fmt: skip
    assert len(factories.ingest_jobs()) == 3


# --- start, end, jitter, zones, targets


def test_an_idempotency_key_that_a_session_holds_delays_one_schedule(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A role that may only submit can insert a job with any key, and keep its transaction open."""
    timeouts.shorten_lock_waits(monkeypatch, 0.2)
    timeouts.shorten_schedule_batches(monkeypatch, 0.1)
    clock = Clock(TEN)
    held = [hourly(f"a{n}", idempotency_key=f"key {n}") for n in range(3)]
    ticker = put(clock, *held, hourly("z"))
    clock.now = TEN + 6 * MINUTE
    tried: set[str] = set()
    locked: set[str] = set()

    def logged(record: logging.LogRecord) -> None:
        if "is tried later" in (text := record.getMessage()):
            name = text.split()[1]
            found = rows("SELECT name FROM schedules FOR UPDATE SKIP LOCKED")
            locked.update(tried - {name} - {row["name"] for row in found})
            tried.add(name)

    monkeypatch.setattr(caplog.handler, "emit", logged)
    with queue_workflows.db.connect(autocommit=False, limited=False) as submitter:
        for number in range(3):
            submitter.execute(
                "INSERT INTO ingest_jobs (task_name, queue, idempotency_key)"
                " VALUES ('prices', 'fetch', %s)",
                (f"key {number}",),
            )
        ticker.run_once()
        assert fires() == [("z", 5, None)]
        # Each wait for a lock ends its transaction, so that no other schedule stays locked.
        assert (tried, locked) == ({"a0", "a1", "a2"}, set())
        submitter.rollback()

    def caught_up() -> bool:
        ticker.run_once()
        return len(fires()) == 4

    wait.until(caught_up)


def test_a_session_that_holds_many_idempotency_keys_delays_other_schedules_little(
    db: ModuleType,
):
    clock = Clock(TEN)
    held = [hourly(f"a{n}", idempotency_key=f"key {n}") for n in range(10)]
    ticker = put(clock, *held, hourly("z"))
    clock.now = TEN + 6 * MINUTE
    with queue_workflows.db.connect(autocommit=False, limited=False) as submitter:
        submitter.execute(
            "INSERT INTO ingest_jobs (task_name, queue, idempotency_key)"
            " SELECT 'prices', 'fetch', 'key ' || n FROM generate_series(0, 9) n"
        )
        began = time.monotonic()
        ticker.run_once()
        assert time.monotonic() - began < 15  # with LOCK_TIMEOUT_S for each: 30
        assert fires() == [("z", 5, None)]
        submitter.rollback()


def test_start_and_end_bound_the_instants(db: ModuleType):
    clock = Clock(TEN)
    bounds: dict[str, Any] = {"start_at": TEN + 65 * MINUTE, "end_at": TEN + 125 * MINUTE}
    ticker = put(clock, hourly(overlap="allow", **bounds))
    after(ticker, clock, *range(0, 126, 5))
    assert rows("SELECT ended FROM schedules") == [{"ended": True}]
    after(ticker, clock, *range(130, 300, 5))
    assert fires() == [("s", 65, None), ("s", 125, None)]


def test_a_schedule_that_is_over_when_it_is_planned_has_ended(db: ModuleType):
    put(Clock(TEN), hourly(end_at=TEN - HOUR))
    assert rows("SELECT ended, next_at FROM schedules") == [{"ended": True, "next_at": None}]


def test_a_schedule_that_has_ended_fires_again_once_its_end_is_lifted(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(end_at=TEN + 6 * MINUTE, overlap="allow"))
    after(ticker, clock, 5, 6)
    assert rows("SELECT ended FROM schedules") == [{"ended": True}]
    config.set_ingest_schedule([hourly(overlap="allow")])
    after(ticker, clock, 64, 65)
    assert fires() == [("s", 5, None), ("s", 65, None)]


def test_a_schedule_that_has_ended_is_not_overdue(db: ModuleType):
    put(Clock(TEN), hourly(end_at=TEN - HOUR))
    assert rows("SELECT ended FROM schedules") == [{"ended": True}]
    assert schedules.troubled() == []


@pytest.mark.parametrize("planned", [False, True])
def test_a_schedule_that_another_session_holds_delays_no_other(db: ModuleType, planned: bool):
    clock = Clock(TEN)
    ticker = put(clock, hourly("held"), hourly("free"))
    if not planned:
        rows("UPDATE schedules SET next_at = NULL, wake_at = NULL RETURNING name")
    with db.connect() as own, own.transaction():
        own.execute("SELECT FROM schedules WHERE name = 'held' FOR UPDATE")
        after(ticker, clock, 5, 5.1)
        assert fires() == [("free", 5, None)]
    after(ticker, clock, 5.2, 5.3)
    assert fires() == [("free", 5, None), ("held", 5, None)]


def test_jitter_delays_the_fire_and_not_its_instant(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(jitter_s=1800.0))
    (row,) = rows("SELECT * FROM schedules")
    assert timedelta(0) < row["wake_at"] - row["next_at"] <= 30 * MINUTE
    clock.now = row["wake_at"] - timedelta(seconds=1)
    assert ticker.run_once() == []
    clock.now = row["wake_at"]
    assert len(ticker.run_once()) == 1
    assert fires() == [("s", 5, None)]


def test_a_night_in_warsaw_fires_once_across_both_changes(db: ModuleType):
    for day, utc in (("2024-03-31", 1), ("2024-10-27", 0)):
        start = datetime.fromisoformat(f"{day}T00:00").replace(tzinfo=UTC) - HOUR
        clock = Clock(start)
        night = hourly(day, "30 2 * * *", tz="Europe/Warsaw", overlap="allow")
        ticker = put(clock, night)
        for _ in range(24):
            clock.now += 15 * MINUTE
            ticker.run_once()
        (found,) = rows(f"SELECT fire_at FROM schedule_fires WHERE name = '{day}'")
        wanted = start + HOUR + utc * HOUR + (0 if utc else 30) * MINUTE
        assert found["fire_at"] == wanted


def test_a_workflow_is_submitted_with_its_inputs(db: ModuleType):
    clock = Clock(TEN)
    wanted = Schedule("w", "5 * * * *", workflow_name="nightly", inputs={"a": 1}, priority=5)
    (run_id,) = after(put(clock, wanted), clock, 5)
    (run,) = rows("SELECT * FROM workflow_runs")
    assert (run["id"], run["workflow_name"], run["status"]) == (run_id, "nightly", "queued")
    assert (run["context"], run["priority"]) == ({"a": 1}, 5)
    (fired,) = rows("SELECT * FROM schedule_fires")
    assert fired["run_id"] == run_id
    # A run that is not over holds the next one back.
    ticker = Ticker(now_fn=clock)
    assert after(ticker, clock, 65) == []


# --- rows by plain SQL


def test_a_row_by_plain_sql_fires_and_a_bad_one_has_an_error(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    clock = Clock(TEN)
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO schedules (name, expression, task_name, queue) VALUES"
            " ('good', 'every 1h', 'prices', 'fetch'), ('bad', '61 * * * *', 'prices', 'fetch'),"
            " ('zone', 'every 1h', 'prices', 'fetch'), ('task', 'every 1h', 'nope', 'fetch')"
        )
        conn.execute("UPDATE schedules SET tz = 'Mars' WHERE name = 'zone'")
    ticker = Ticker(now_fn=clock)
    ticker.run_once()
    after(ticker, clock, 60, 120)
    found = {row["name"]: row["error"] for row in rows("SELECT name, error FROM schedules")}
    assert found["good"] is None
    assert "Bad minute" in found["bad"]
    assert "no IANA time zone" in found["zone"]
    assert "unknown ingest task 'nope'" in found["task"]
    assert {name for name, _, _ in fires()} == {"good"}
    assert caplog.text.count("'bad' does not fire") == 1


def test_a_change_forgets_the_plan_and_wakes_a_running_scheduler_at_once(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    config.set_ingest_schedule([])
    schedules.add("far", "every 366d", task_name="prices", queue="fetch")
    ticker = Ticker()
    thread = threading.Thread(target=ticker.run_forever, name="ticker")
    thread.start()
    try:
        wait.until(lambda: rows("SELECT FROM schedules WHERE next_at IS NOT NULL"))
        with db.connection() as conn:
            conn.execute("UPDATE schedules SET expression = 'every 1s'")
        # Far less than LOOK_EVERY_S: only the notification can have woken it.
        wait.until(factories.ingest_jobs, timeout_s=10)
    finally:
        ticker.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert scheduler.LOOK_EVERY_S > 20


def test_a_pause_fires_nothing_also_afterwards(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="allow"))
    schedules.pause("s")
    after(ticker, clock, 5, 65)
    schedules.resume("s")
    with db.connection() as conn:
        conn.execute("UPDATE schedules SET changed_at = %s", (clock.now + MINUTE,))
    after(ticker, clock, 67)
    assert fires() == []
    after(ticker, clock, 125)
    assert fires() == [("s", 125, None)]


def test_a_resume_beside_a_scheduler_that_has_read_the_clock_fires_nothing_of_the_pause(
    db: ModuleType,
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="allow"))
    after(ticker, clock, 5)
    schedules.pause("s")
    after(ticker, clock, 66)
    schedules.resume("s")
    with db.connection() as conn:
        conn.execute("UPDATE schedules SET changed_at = %s", (clock.now + MINUTE / 100,))
    after(ticker, clock, 66, 125)
    assert fires() == [("s", 5, None), ("s", 125, None)]


def test_a_resume_in_a_long_transaction_fires_nothing_of_the_pause_before(db: ModuleType):
    """The transaction begins before the instant, and resumes the schedule after it."""
    schedules.add("s", "every 1s", task_name="prices", queue="fetch", overlap="allow")
    schedules.pause("s")
    with db.connection() as conn:
        began = factories.one(conn, "SELECT now()")
        wait.until(lambda: factories.one(conn, "SELECT clock_timestamp() > now() + '1.1 s'"))
        schedules.resume("s", conn=conn)
        resumed = factories.one(conn, "SELECT clock_timestamp()")
    Ticker().run_once()
    assert all(row["fire_at"] > resumed for row in rows("SELECT * FROM schedule_fires"))
    assert began + timedelta(seconds=1) < resumed


def test_an_entry_removed_from_the_code_is_marked_and_a_changed_one_has_its_changes(db: ModuleType):
    clock = Clock(TEN)
    put(clock, hourly("a"), hourly("b"))
    config.set_ingest_schedule([hourly("b", "6 * * * *")])
    Ticker(now_fn=clock).run_once()
    found = {row["name"]: row for row in schedules.list()}
    assert found["a"]["gone_at"] is not None
    assert found["b"]["gone_at"] is None
    assert found["b"]["changes"] == {"expression": ["5 * * * *", "6 * * * *"]}
    with pytest.raises(errors.InvalidConfig, match="'b' exists, from code"):
        schedules.add("b", "every 1h", task_name="prices", queue="fetch")


def test_an_entry_that_comes_back_to_the_code_unchanged_fires_again(db: ModuleType):
    clock = Clock(TEN)
    put(clock, hourly("a"), hourly("b"))
    put(clock, hourly("b"))
    ticker = put(clock, hourly("a"), hourly("b"))
    after(ticker, clock, 5)
    assert {name for name, _, _ in fires()} == {"a", "b"}


def test_a_change_of_the_zone_by_sql_forgets_the_plan(db: ModuleType):
    put(Clock(TEN), hourly())
    rows("UPDATE schedules SET tz = 'Asia/Kolkata' RETURNING name")
    assert rows("SELECT next_at, wake_at, definition_hash FROM schedules") == [
        {"next_at": None, "wake_at": None, "definition_hash": None}
    ]


def test_the_instants_of_an_entry_that_was_not_in_the_code_never_fire(db: ModuleType):
    clock = Clock(TEN)
    a, b = hourly("a", catch_up="last"), hourly("b")
    put(clock, a, b)
    clock.now = TEN + MINUTE
    config.set_ingest_schedule([b])
    Ticker(now_fn=clock).run_once()
    clock.now = TEN + 130 * MINUTE
    config.set_ingest_schedule([a, b])
    ticker = Ticker(now_fn=clock)
    after(ticker, clock, 130, 131)
    assert [at for name, at, _ in fires() if name == "a"] == []
    after(ticker, clock, 185)
    assert [at for name, at, _ in fires() if name == "a"] == [185]


def test_an_outage_of_the_database_is_waited_out(db: ModuleType):
    clock = Clock(TEN)
    put(clock, hourly())
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        threading.Event().wait(0.01)

    ticker = Ticker(now_fn=clock, sleep_fn=nap)
    thread = threading.Thread(target=ticker.run_forever, name="ticker")
    thread.start()
    try:
        wait.until(lambda: naps)
        with db.connection() as conn:
            conn.execute("ALTER TABLE schedules RENAME TO away")
        try:
            clock.now = TEN + 6 * MINUTE
            count = len(naps)
            wait.until(lambda: len(naps) > count + 5)
        finally:
            with db.connection() as conn:
                conn.execute("ALTER TABLE away RENAME TO schedules")
        wait.until(fires)
    finally:
        ticker.stop()
        thread.join(30)
    assert fires() == [("s", 5, None)]


def test_what_the_code_names_is_stored_by_the_call_after_one_that_failed(db: ModuleType):
    clock = Clock(TEN)
    config.set_ingest_schedule([hourly()])
    ticker = Ticker(now_fn=clock)
    with db.connection() as conn:
        conn.execute("ALTER TABLE schedules RENAME TO away")
    try:
        with pytest.raises(db.Error):
            ticker.run_once()
    finally:
        with db.connection() as conn:
            conn.execute("ALTER TABLE away RENAME TO schedules")
    ticker.run_once()
    assert rows("SELECT name FROM schedules") == [{"name": "s"}]


# --- the API


def test_a_task_and_a_workflow_are_scheduled_by_a_decorator(db: ModuleType):
    @schedules.schedule("every 1h", queue="fetch", args={"a": 1})
    @queue_workflows.register_ingest_task("decorated")
    def decorated(reason: str, args: dict[str, Any]) -> None: ...

    (found,) = config.get_config().ingest_schedule
    assert (found.name, found.task_name, found.tz) == ("decorated", "decorated", "UTC")
    with pytest.raises(errors.InvalidConfig, match="above the decorator that registers it"):
        schedules.schedule("every 1h")(lambda: None)


def test_a_second_schedule_of_one_target_has_a_name_of_its_own(db: ModuleType):
    queue_workflows.register_ingest_task("twice", task := lambda: None)
    for _ in range(2):
        schedules.schedule("0 3 * * *", queue="fetch")(task)
    with pytest.raises(errors.InvalidConfig, match="two schedules are named 'twice'"):
        schedules.schedule("0 15 * * *", queue="fetch")(task)
    schedules.schedule("0 15 * * *", queue="fetch", name="at three")(task)
    assert [one.name for one in config.get_config().ingest_schedule] == ["twice", "at three"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("end_at = start_at - interval '1 s'", r"schedules\.end_at is before start_at"),
        ("args = '[1]'", "must be JSON objects"),
        ("inputs = '3'", "must be JSON objects"),
        ("headers = '\"x\"'", "must be JSON objects"),
        ("inputs = '{\"a\": 1}'", "inputs to a workflow"),
        ("task_name = NULL, workflow_name = 'w'", "belong to a task"),
        ("task_name = NULL, workflow_name = 'w', queue = NULL, headers = '{}'", "belong to a task"),
    ],
)
def test_sql_is_refused_what_python_is_refused(db: ModuleType, change: str, said: str):
    schedules.add("s", "every 1h", task_name="prices", queue="fetch", start_at=TEN)
    with pytest.raises(db.Error, match=said):
        rows(f"UPDATE schedules SET {change}")
    for allowed in ("end_at = start_at", "task_name = NULL, workflow_name = 'w', queue = NULL"):
        assert rows(f"UPDATE schedules SET {allowed} RETURNING name") == [{"name": "s"}]


def test_add_replaces_what_sql_has_changed(db: ModuleType):
    for hour in (3, 3):
        schedules.add("s", f"0 {hour} * * *", task_name="prices", queue="fetch")
        assert rows("SELECT expression FROM schedules") == [{"expression": "0 3 * * *"}]
        rows("UPDATE schedules SET expression = '0 4 * * *' RETURNING name")
    schedules.pause("s")
    (before,) = rows("SELECT xmin::text, definition_hash FROM schedules")
    assert before["definition_hash"] is None
    schedules.add("s", "0 3 * * *", task_name="prices", queue="fetch")
    schedules.resume("s")
    (row,) = rows("SELECT xmin::text, definition_hash, expression FROM schedules")
    assert row["definition_hash"] and row["expression"] == "0 3 * * *"
    schedules.add("s", "0 3 * * *", task_name="prices", queue="fetch")
    assert rows("SELECT xmin::text FROM schedules") == [{"xmin": row["xmin"]}], "it is the same"


def test_code_replaces_what_sql_has_changed_when_a_scheduler_starts(db: ModuleType):
    clock = Clock(TEN)
    put(clock, hourly())
    rows("UPDATE schedules SET expression = 'every 5m' RETURNING name")
    Ticker(now_fn=clock).run_once()
    (row,) = schedules.list()
    assert row["expression"] == "5 * * * *"
    assert row["changes"]["expression"] == ["every 5m", "5 * * * *"]


def test_a_schedule_of_the_code_that_the_database_refuses_does_not_stop_the_others(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    with db.connection() as conn:
        conn.execute("ALTER TABLE schedules ADD CONSTRAINT refused CHECK (name <> 'wrong')")
    try:
        clock = Clock(TEN)
        ticker = put(clock, hourly("good"), hourly("wrong"), hourly("zoned"))
        assert len(after(ticker, clock, 5)) == 2
    finally:
        with db.connection() as conn:
            conn.execute("ALTER TABLE schedules DROP CONSTRAINT refused")
    assert "schedule 'wrong' is left out" in caplog.text


def test_what_cannot_be_a_name_is_an_unknown_schedule(db: ModuleType):
    for name in (1, None, "a\0b", "a\ud800", "", "x" * 300):
        with tabled.case(name):
            for call in (
                schedules.run_now,
                schedules.pause,
                schedules.resume,
                schedules.remove,
                schedules.preview,
            ):
                with pytest.raises(errors.UnknownSchedule, match="no schedule"):
                    call(name)


def test_a_preview_of_days_that_do_not_come_is_refused(db: ModuleType):
    for days in (0, -1, float("nan"), float("inf"), 1e12):
        with tabled.case(days):
            schedules.add("s", "every 1h", task_name="prices", queue="fetch")
            with pytest.raises(errors.InvalidConfig, match="days is a number above 0"):
                schedules.preview("s", days=days)


@pytest.mark.parametrize("options", [{"name": ""}, {"name": 0}, {"colour": 3}])
def test_a_decorator_refuses_what_add_refuses(db: ModuleType, options: Any):
    queue_workflows.register_ingest_task("decorated", task := lambda: None)
    with pytest.raises(errors.InvalidConfig):
        schedules.schedule("every 1h", queue="fetch", **options)(task)
    assert config.get_config().ingest_schedule == []


def test_run_now_fires_beside_the_instants_and_heeds_the_overlap(db: ModuleType):
    schedules.add("s", "every 366d", task_name="prices", queue="fetch")
    made = schedules.run_now("s")
    assert [(job["id"], job["reason"]) for job in factories.ingest_jobs()] == [(made, "manual")]
    assert schedules.run_now("s") is None
    assert schedules.fire_now("s") == schedules.Fired(None, "overlap")
    schedules.remove("s")
    for call in (schedules.run_now, schedules.pause, schedules.resume, schedules.remove):
        with pytest.raises(errors.UnknownSchedule, match="no schedule 's'"):
            call("s")


@pytest.mark.parametrize(
    ("policy", "skipped"),
    [("queue", "overlap"), ("skip", "overlap"), ("allow", None), ("replace", None)],
)
def test_run_now_beside_an_unfinished_job(db: ModuleType, policy: Any, skipped: str | None):
    schedules.add("s", "every 366d", task_name="prices", queue="fetch", overlap=policy)
    first = schedules.run_now("s")
    again = schedules.fire_now("s")
    assert again.skipped == skipped and (again.id is None) is (skipped is not None)
    finish()
    assert schedules.run_now("s") not in (None, first)


def test_run_now_names_an_idempotency_key_that_is_used(db: ModuleType):
    schedules.add("s", "every 366d", task_name="prices", queue="fetch", idempotency_key="k")
    assert schedules.run_now("s")
    finish()
    assert schedules.fire_now("s") == schedules.Fired(None, "idempotency key")


def test_the_list_has_failures_in_a_row(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(overlap="allow"))
    after(ticker, clock, 5, 65, 125, 185)
    for number, status in enumerate(("failed", "completed", "failed", "failed")):
        with db.connection() as conn:
            conn.execute(
                "UPDATE ingest_jobs SET status = %s, finished_at = now() WHERE id = %s",
                (status, factories.ingest_jobs()[number]["id"]),
            )
    (row,) = schedules.list()
    assert (row["last_status"], row["failures"]) == ("failed", 2)
    with db.connection() as conn:
        conn.execute("DELETE FROM schedule_fires")
    (row,) = schedules.troubled()
    assert (row["last_status"], row["failures"]) == ("failed", 1), "fires are past their retention"


def test_bad_input_is_refused_before_any_write(db: ModuleType):
    cases: list[Any] = [
        ({}, "give either task_name or workflow_name"),
        ({"task_name": "prices", "workflow_name": "w"}, "give either task_name or"),
        ({"task_name": "nope", "queue": "fetch"}, "'s': unknown ingest task 'nope'"),
        ({"task_name": "prices", "queue": "nowhere"}, "unknown queue 'nowhere'"),
        ({"task_name": "prices", "queue": "fetch", "tz": "Mars"}, "no IANA time zone"),
        ({"task_name": "prices", "queue": "fetch", "catch_up": "some"}, "one of none, last, all"),
        ({"task_name": "prices", "queue": "fetch", "overlap": "x"}, "allow, skip, replace, queue"),
        ({"task_name": "prices", "queue": "fetch", "jitter_s": -1}, "jitter_s is a number"),
        ({"task_name": "prices", "queue": "fetch", "jitter_s": float("nan")}, "jitter_s"),
        ({"task_name": "prices", "queue": "fetch", "catch_up_max": 0}, "whole number 1-1000"),
        ({"task_name": "prices", "queue": "fetch", "start_at": TEN.replace(tzinfo=None)}, "zone"),
        ({"task_name": "prices", "queue": "fetch", "args": 3}, "args is a mapping"),
        ({"task_name": "prices", "queue": "fetch", "colour": 3}, "'colour' is none of"),
        ({"task_name": "prices", "headers": 3}, "headers is a mapping of texts"),
        ({"task_name": "prices", "headers": {"a": 3}}, "headers is a mapping of texts"),
        ({"task_name": "prices", "priority": "low"}, "priority is a whole number -32768 to 32767"),
        ({"workflow_name": "w", "priority": 40_000}, "priority is a whole number"),
        ({"task_name": "prices", "queue": "fetch", "args": {"a": {1}}}, "JSON"),
        ({"task_name": "prices", "tz": 7}, "tz is a text such as 'Europe/Warsaw', not 7"),
        ({"task_name": "prices", "tz": ["UTC"]}, "tz is a text such as"),
        ({"task_name": "prices", "tz": "localtime"}, "no IANA time zone"),
        ({"task_name": "prices", "tz": "right/Europe/Warsaw"}, "no IANA time zone"),
        ({"task_name": "prices", "catch_up_within_s": 0}, "catch_up_within_s is a number"),
        ({"task_name": "prices", "end_at": "soon"}, "end_at is a datetime with a time zone"),
        (
            {"task_name": "prices", "start_at": datetime(1970, 1, 1, tzinfo=UTC)},
            "start_at is from 2000-01-01 to 9999-12-31",
        ),
        (
            {"task_name": "prices", "end_at": datetime(1, 1, 1, tzinfo=timezone(9 * HOUR))},
            "end_at is from 2000",
        ),
        ({"task_name": "prices", "jitter_s": 10**400}, "jitter_s is a number"),
        ({"task_name": "prices", "queue": "\u00e9" * 101}, "queue has over 200 bytes"),
        ({"workflow_name": "w\ud800"}, "workflow_name must be a text"),
        (
            {"task_name": "prices", "start_at": TEN, "end_at": TEN - HOUR},
            "end_at is before start_at",
        ),
        ({"workflow_name": "w", "queue": "fetch"}, "queue belongs to a schedule of a task"),
    ]
    for options, said in cases:
        with tabled.case(options, said):
            with pytest.raises(ValueError, match=said):
                schedules.add("s", "every 1h", **options)
            assert rows("SELECT FROM schedules") == []


def test_a_preview_lists_the_coming_instants(db: ModuleType):
    schedules.add("s", "every 6h", task_name="prices", queue="fetch")
    assert len(schedules.preview("s", days=2)) in (8, 9)
    config.set_ingest_schedule([scheduler.ScheduleEntry("old", 5, "prices", "fetch", hours=[1])])
    assert len(schedules.preview("old", days=30)) in (30, 31)
    assert {row["name"] for row in schedules.list()} == {"s", "old"}


def test_a_preview_has_the_instants_at_its_start_and_at_its_end(db: ModuleType):
    day = timedelta(days=1)
    start = datetime.now(UTC).replace(hour=3, minute=0, second=0, microsecond=0) + 2 * day
    bounds: dict[str, Any] = {"start_at": start, "end_at": start + 2 * day}
    schedules.add("s", "0 3 * * *", task_name="prices", queue="fetch", **bounds)
    found = [one.at for one in schedules.preview("s", days=30)]
    assert found == [start, start + day, start + 2 * day]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("61 * * * *", "Bad minute; it takes five fields"),
        (7, "expression is a text such as '0 3 * * *', not 7"),
    ],
)
@pytest.mark.parametrize("way", ["declared", "added", "decorated"])
def test_a_wrong_expression_is_refused_at_registration(expression: Any, said: str, way: str):
    config.register_ingest_task("prices", task := lambda: None)
    register: dict[str, Callable[[], object]] = {
        "declared": lambda: Schedule("prices", expression, task_name="prices"),
        "added": lambda: schedules.add("prices", expression, task_name="prices", queue="fetch"),
        "decorated": lambda: schedules.schedule(expression, queue="fetch")(task),
    }
    with pytest.raises(errors.InvalidConfig, match="prices") as refused:
        register[way]()
    assert said in str(refused.value)
    assert config.get_config().ingest_schedule == []


def test_a_jitter_longer_than_the_grace_is_not_late(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly(jitter_s=1800.0, catch_up="none"))
    (row,) = rows("SELECT * FROM schedules")
    assert row["wake_at"] - row["next_at"] > timedelta(seconds=timetable.GRACE_S)
    clock.now = row["wake_at"]
    assert len(ticker.run_once()) == 1


def test_an_instant_that_catch_up_leaves_out_is_missed(
    db: ModuleType, caplog: pytest.LogCaptureFixture
):
    clock = Clock(TEN)
    ticker = put(clock, hourly(catch_up="none"))
    after(ticker, clock, 30)
    assert "schedule 's' missed its instant 2024-05-01T10:05:00+00:00" in caplog.text
    (row,) = schedules.troubled()
    assert row["missed"] and row["missed_at"] == TEN + 5 * MINUTE
    text = schedules.problem({**row, "late_s": None})
    assert text is not None and text.startswith("missed its instant 2024-05-01T1")
    after(ticker, clock, 65)
    (row,) = schedules.list()
    assert not row["missed"] and row["missed_at"] == TEN + 5 * MINUTE


def test_run_now_before_the_first_plan_loses_no_instant(db: ModuleType):
    schedules.add("s", every="1h", task_name="prices", queue="fetch", overlap="allow")
    with queue_workflows.db.connection() as conn:
        conn.execute("UPDATE schedules SET changed_at = now() - interval '90 minutes'")
    made = schedules.run_now("s")
    assert len(Ticker().run_once()) == 1
    planned, now = rows("SELECT * FROM schedule_fires ORDER BY fire_at")
    assert (planned["job_id"] != made) and now["job_id"] == made


def test_run_now_wakes_the_schedulers_for_a_row_that_it_has_planned(db: ModuleType):
    schedules.add("s", every="1h", task_name="prices", queue="fetch")
    with queue_workflows.db.connect() as conn:
        conn.execute("LISTEN schedules_changed")
        schedules.run_now("s")
        assert [one.channel for one in conn.notifies(timeout=30, stop_after=1)] == [
            "schedules_changed"
        ]


def test_run_now_of_a_row_that_cannot_be_planned_leaves_the_reason_to_the_scheduler(
    db: ModuleType,
):
    with queue_workflows.db.connection() as conn:
        conn.execute(
            "INSERT INTO schedules (name, expression, task_name, queue)"
            " VALUES ('s', 'never', 'prices', 'fetch')"
        )
    assert schedules.run_now("s")
    Ticker().run_once()
    assert "never" in rows("SELECT error FROM schedules")[0]["error"]


@pytest.mark.parametrize(
    "change",
    ["paused = false", "expression = expression, args = args, gone_at = NULL", "name = name"],
)
def test_an_update_that_changes_nothing_loses_no_instant(db: ModuleType, change: str):
    clock = Clock(TEN)
    ticker = put(clock, hourly())
    with queue_workflows.db.connection() as conn:
        conn.execute(sql.SQL("UPDATE schedules SET {}").format(sql.SQL(change)))  # pyright: ignore[reportArgumentType]
    after(ticker, clock, 6)
    assert fires() == [("s", 5.0, None)]


def test_resume_of_what_is_not_paused_loses_no_instant(db: ModuleType):
    clock = Clock(TEN)
    ticker = put(clock, hourly())
    schedules.resume("s")
    after(ticker, clock, 6)
    assert fires() == [("s", 5.0, None)]


def test_args_that_the_task_would_drop_are_refused(db: ModuleType):
    config.register_ingest_task("drops", lambda day="yesterday": day)
    config.register_ingest_task("takes", lambda *, day="yesterday": day)
    given: dict[str, Any] = {"queue": "fetch", "args": {"day": "today"}}
    with pytest.raises(errors.ArgsRefused, match=r"schedule 's': .* make it keyword-only"):
        schedules.add("s", every="1h", task_name="drops", **given)
    assert rows("SELECT FROM schedules") == []
    schedules.add("s", every="1h", task_name="takes", **given)
    schedules.add("t", every="1h", task_name="drops", queue="fetch")
