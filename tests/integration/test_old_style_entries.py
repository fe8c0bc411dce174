"""Old-style entries are rows of `schedules` too, and the boot kick queues what is overdue."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, errors, schedules
from queue_workflows.scheduler import ScheduleEntry, Ticker
from tests.support import frequent_schedule, wait
from tests.support.clocks import Clock
from tests.support.factories import execute as rows

TEN = datetime(2024, 5, 1, 10, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _tasks(clean_process: None) -> None:
    for name in ("prices", "other", "check_freshness"):
        config.register_ingest_task(name, lambda: None)


def entry(name: str = "prices", minute: int = 5, task: str = "prices", **more: Any):
    return ScheduleEntry(name, minute, task, "fetch", **more)


def fires() -> list[tuple[str, float]]:
    """Name and minutes after ten."""
    found = rows("SELECT * FROM schedule_fires ORDER BY fire_at, name")
    return [(row["name"], (row["fire_at"] - TEN) / MINUTE) for row in found]


def reasons() -> list[str]:
    return [row["reason"] for row in rows("SELECT reason FROM ingest_jobs ORDER BY seq")]


def follow(clock: Clock[datetime], *entries: ScheduleEntry, **more: Any) -> Ticker:
    config.set_ingest_schedule(entries)
    return Ticker(now_fn=clock, **more)


# --- rows ----------------------------------------------------------------------------------------


def test_an_entry_is_paused_resumed_fired_listed_and_previewed_by_its_name(db: ModuleType):
    clock = Clock(TEN)
    ticker = follow(clock, entry(), entry("nightly", 30, hours={3}))
    ticker.run_once()
    found = {row["name"]: row for row in schedules.list()}
    assert sorted(found) == ["nightly", "prices"]
    assert (found["prices"]["minute"], found["prices"]["hours"]) == (5, None)
    assert (found["nightly"]["minute"], found["nightly"]["hours"]) == (30, [3])
    assert found["nightly"]["next_fire_at"] == TEN + 17.5 * HOUR
    assert len(schedules.preview("nightly", days=30)) in (30, 31)
    schedules.pause("prices")
    clock.now = TEN + 6 * MINUTE
    assert ticker.run_once() == []
    assert schedules.run_now("prices") is not None
    schedules.resume("prices")
    assert ticker.run_once() == []
    clock.now = TEN + 66 * MINUTE
    assert len(ticker.run_once()) == 1
    assert reasons() == ["manual", "tick"]


def test_entries_keep_their_catch_up_of_an_hour_and_never_wait_for_each_other(db: ModuleType):
    clock = Clock(TEN)
    daily = entry("daily", 30, hours={11})
    too_old = entry("too old", 30, hours={14})  # the outage ends 1.7 hours after its instant
    ticker = follow(clock, entry(), daily, too_old)
    ticker.run_once()
    for hours in (1.2, 2.2, 6.2):
        clock.now = TEN + hours * HOUR
        ticker.run_once()
    assert fires() == [("prices", 65), ("daily", 90), ("prices", 125), ("prices", 365)]
    assert {row["status"] for row in rows("SELECT status FROM ingest_jobs")} == {"queued"}


def test_entries_of_one_name_fire_at_each_of_their_minutes(db: ModuleType):
    clock = Clock(TEN)
    entries = [
        entry("p", 35), entry("p", 5), entry("p", 5, hours={10}), entry("p", 50, "other"),
    ]  # fmt: skip
    ticker = follow(clock, *entries)
    for minutes in range(60):
        clock.now = TEN + minutes * MINUTE
        ticker.run_once()
    assert fires() == [("p", 5), ("p#2", 35), ("p#3", 50)]
    tasks = [row["task_name"] for row in rows("SELECT task_name FROM ingest_jobs ORDER BY seq")]
    assert tasks == ["prices", "prices", "other"]


def test_an_entry_whose_instants_only_python_knows_is_refused(db: ModuleType):
    class Odd(ScheduleEntry):
        def next_fire_at(self, now: datetime) -> datetime:
            return now + MINUTE

    with pytest.raises(errors.InvalidConfig, match="override the property `expression`"):
        follow(Clock(TEN), Odd("odd", 5, "prices", "fetch")).run_once()
    follow(Clock(TEN), frequent_schedule.Every("e", 0, "prices", "fetch")).run_once()
    assert rows("SELECT expression FROM schedules") == [{"expression": "every 2s"}]


def test_an_entry_that_no_scheduler_has_stored_has_its_last_fire_up_to_now(db: ModuleType):
    config.set_ingest_schedule([entry("ahead"), entry("prices"), entry("other"), entry("new")])
    now = rows("SELECT now() AS now")[0]["now"]
    with db.connection() as conn:
        for name, minutes in (
            ("prices", -70), ("prices", -10), ("other", -90), ("prices", 5), ("ahead", 5),
        ):  # fmt: skip
            conn.execute(
                "INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)",
                (name, now + minutes * MINUTE),
            )
    found = {row["name"]: row["last_fire_at"] for row in schedules.list()}
    past = {"prices": now - 10 * MINUTE, "other": now - 90 * MINUTE}
    assert found == past | {"ahead": None, "new": None}, "a clock that was ahead left later ones"


# --- the boot kick -------------------------------------------------------------------------------


def test_a_boot_job_that_fails_is_a_problem_of_its_schedule(db: ModuleType):
    (job_id,) = follow(Clock(TEN), entry(), boot_kick=True).run_once()
    rows(
        "UPDATE ingest_jobs SET status = 'failed', finished_at = now()"
        f" WHERE id = '{job_id}' RETURNING id"
    )
    (row,) = schedules.troubled()
    assert (row["name"], row["failures"], row["last_status"]) == ("prices", 1, "failed")
    assert schedules.problem({**row, "late_s": None}) == "failed the last time"


def test_a_start_queues_each_entry_that_has_not_fired_within_its_period(db: ModuleType):
    clock = Clock(TEN)
    names = {"never": None, "late": -61.0, "just": -10.0, "daily": -20 * 60.0, "old": -25 * 60.0}
    with db.connection() as conn:
        for name, minutes in names.items():
            if minutes is not None:
                conn.execute(
                    "INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)",
                    (name, TEN + minutes * MINUTE),
                )
    entries = [entry(name, 30) for name in ("never", "late", "just")]
    entries += [entry(name, 30, hours={23}) for name in ("daily", "old")]
    entries.append(entry("fresh", 30, "check_freshness"))
    ids = follow(clock, *entries, boot_kick=True).run_once()
    booted = [name for name, at in fires() if at == 0]
    assert booted == ["never:boot", "old:boot"], "late fires as its missed instant does"
    assert sorted(reasons()) == ["boot", "boot", "tick"]
    assert len(ids) == 3
    clock.now = TEN + 10 * MINUTE
    assert follow(clock, *entries, boot_kick=True).run_once() == [], "a restart"
    found = {row["name"]: row for row in schedules.list()}
    assert found["old"]["last_status"] == "queued"


def test_a_start_queues_an_entry_that_only_a_clock_that_was_ahead_has_fired(db: ModuleType):
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO schedule_fires (name, fire_at) VALUES ('prices', %s)", (TEN + HOUR,)
        )
    assert len(follow(Clock(TEN), entry(), boot_kick=True).run_once()) == 1
    assert reasons() == ["boot"]


def test_a_start_queues_no_paused_entry_and_no_schedule(db: ModuleType):
    clock = Clock(TEN)
    new = schedules.Schedule("new", "5 * * * *", task_name="prices", queue="fetch")
    follow(clock, entry("paused"), new).run_once()  # pyright: ignore[reportArgumentType]
    schedules.pause("paused")
    assert Ticker(now_fn=clock, boot_kick=True).run_once() == []
    assert Ticker(now_fn=clock).run_once() == []
    assert fires() == []


def test_schedulers_that_start_together_queue_one_job(db: ModuleType):
    clock = Clock(TEN)
    entries = [entry(f"e{minute}", minute) for minute in range(1, 9)]
    config.set_ingest_schedule(entries)
    barrier = threading.Barrier(4)

    def start() -> None:
        ticker = Ticker(now_fn=clock, boot_kick=True)
        barrier.wait(30)
        ticker.run_once()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert fires() == [(f"e{minute}:boot", 0) for minute in range(1, 9)]
    assert reasons() == ["boot"] * 8


def test_the_command_kicks_at_boot(db: ModuleType, tmp_path: Path):
    (tmp_path / "kicked.py").write_text(
        "import queue_workflows\n"
        "from queue_workflows import schedules\n"
        "queue_workflows.register_ingest_task('prices', lambda: None)\n"
        "schedules.set([\n"
        "    schedules.ScheduleEntry('p', 5, 'prices', 'fetch'),\n"
        "    schedules.Schedule('s', 'every 1s', task_name='prices', queue='fetch',\n"
        "                       overlap='allow'),\n"
        "])\n"
    )
    root = str(Path(queue_workflows.__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    child = subprocess.Popen(
        [sys.executable, "-m", "queue_workflows.scheduler", "--app", "kicked"],
        env={**os.environ, **env},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait.until(lambda: reasons().count("tick") > 1, timeout_s=60)
        child.terminate()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait(30)
    assert reasons().count("boot") == 1
