"""Schedulers that are killed, restarted, frozen or cut off fire each instant of the policy once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import timeit
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, scheduler, schedules
from tests.support import proxy, wait

UTC = timezone.utc
STEP = timedelta(minutes=30)
STEPS = 24
OUTAGE = range(9, 15)
"""Steps at which no scheduler runs."""

SCHEDULER = """
import sys, time
from datetime import datetime
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from queue_workflows import config, scheduler, schedules
config.configure(app_name="faked")
config.register_ingest_task("prices", lambda: None)
def one(name, expression, **more):
    return schedules.Schedule(name, expression, tz="Europe/Warsaw", task_name="prices",
                              queue="fetch", **more)
half = "*/30 * * * *"
schedules.set([
    one("night", "30 2 * * *", overlap="allow"),
    one("all", half, overlap="allow", catch_up="all", catch_up_within_s=1e6),
    one("last", half, overlap="allow"),
    one("none", half, overlap="allow", catch_up="none"),
    one("skip", half, catch_up="all", catch_up_within_s=1e6),
    one("replace", half, overlap="replace"),
    one("queue", half, overlap="queue"),
    schedules.ScheduleEntry("entry", 30, "prices", "fetch"),
])
clock = Path(sys.argv[2])
def nap(seconds):
    time.sleep(min(seconds, 0.02))
def now():
    while not (text := clock.read_text()):
        nap(0.01)
    return datetime.fromisoformat(text)
scheduler.Ticker(now_fn=now, sleep_fn=nap).run_forever()
"""


def fired(db: ModuleType) -> set[tuple[str, datetime]]:
    with db.connection() as conn:
        rows = conn.execute("SELECT name, fire_at FROM schedule_fires").fetchall()
    return {(row["name"], row["fire_at"].astimezone(UTC)) for row in rows}


def wanted(start: datetime, last: int, night: datetime) -> set[tuple[str, datetime]]:
    """What the policies name from the first step after `start` to step `last`."""
    # Nobody works on the jobs, so that what waits for the first one waits for ever.
    found: set[tuple[str, datetime]] = {("queue", start + STEP)}
    for step in range(1, last + 1):
        at = start + step * STEP
        found |= {("all", at), ("skip", at)}
        in_outage = step in OUTAGE and last >= OUTAGE.stop
        if not in_outage:
            found |= {("last", at), ("none", at), ("replace", at)}
        if at.minute == 30 and not in_outage:
            found.add(("entry", at))
        if at == night:
            found.add(("night", at))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("start", "night"),
    [("2024-03-30T22:00", "2024-03-31T01:00"), ("2024-10-26T22:00", "2024-10-27T00:30")],
    ids=["spring", "autumn"],
)
def test_three_schedulers_fire_what_the_policies_name_across_a_change_of_the_clock(
    db: ModuleType, tmp_path: Path, start: str, night: str
):
    chance = random.Random(start)
    begun = datetime.fromisoformat(start).replace(tzinfo=UTC)
    once = datetime.fromisoformat(night).replace(tzinfo=UTC)
    clock, log = tmp_path / "clock", (tmp_path / "log").open("w")
    alive: list[subprocess.Popen[bytes]] = []

    def spawn(count: int) -> None:
        args = [sys.executable, "-c", SCHEDULER, str(Path.cwd()), str(clock)]
        alive.extend(subprocess.Popen(args, stderr=log) for _ in range(count))

    def kill(count: int) -> None:
        for _ in range(count):
            child = alive.pop(chance.randrange(len(alive)))
            child.kill()
            child.wait(30)

    clock.write_text(begun.isoformat())
    spawn(3)
    try:
        wait.until(lambda: len(planned(db)) == 8, timeout_s=60)
        for step in range(1, STEPS + 1):
            if step == OUTAGE.start:
                kill(3)
            clock.write_text((begun + step * STEP).isoformat())
            if step in OUTAGE:
                continue
            if step == OUTAGE.stop:
                spawn(3)
            elif step % 4 == 0:
                kill(1)
                spawn(1)
            expected = wanted(begun, step, once)
            wait.until(lambda expected=expected: fired(db) >= expected, timeout_s=60)
            assert fired(db) == expected
    finally:
        kill(len(alive))
        log.close()
    with db.connection() as conn:
        fires = conn.execute("SELECT name, job_id, skipped FROM schedule_fires").fetchall()
        jobs = conn.execute("SELECT id, status FROM ingest_jobs ORDER BY seq").fetchall()
    assert {row["id"] for row in jobs} == {row["job_id"] for row in fires if not row["skipped"]}
    replaced = {row["job_id"] for row in fires if row["name"] == "replace"}
    *gone, last = [job["status"] for job in jobs if job["id"] in replaced]
    assert {*gone} == {"cancelled"} and last == "queued"
    assert len([row for row in fires if row["skipped"] == "overlap"]) == STEPS - 1
    assert "Traceback" not in (tmp_path / "log").read_text()


def planned(db: ModuleType) -> list[Any]:
    with db.connection() as conn:
        return conn.execute("SELECT FROM schedules WHERE next_at IS NOT NULL").fetchall()


# --- a database that is away ---------------------------------------------------------------------


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
from queue_workflows import config, scheduler
config.register_ingest_task("prices", lambda: None)
scheduler.Ticker().run_forever()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["freeze", "cut"])
def test_a_scheduler_outlives_a_database_that_is_away(
    db: ModuleType, wire: proxy.Proxy, tmp_path: Path, way: str
):
    config.register_ingest_task("prices", lambda: None)
    schedules.add("s", "every 1s", task_name="prices", queue="fetch", overlap="allow")
    log = (tmp_path / "log").open("w")
    env = {**os.environ, "QUEUE_WORKFLOWS_DB_URL": wire.dsn}
    child = subprocess.Popen([sys.executable, "-c", REAL, str(Path.cwd())], env=env, stderr=log)
    log.close()
    try:
        wait.until(lambda: len(fired(db)) > 2, timeout_s=60)
        wire.freeze()
        if way == "cut":
            wire.cut()
            wait.until(
                lambda: "waits for the database" in (tmp_path / "log").read_text(), timeout_s=60
            )
        else:
            # A statement or the BEGIN before it is on its way, and nobody replies.
            wait.until(lambda: wire.holds_back(b"BEGIN") or wire.holds_back(b"schedule"))
        stood = len(fired(db))
        wire.thaw()
        wait.until(lambda: len(fired(db)) > stood + 2, timeout_s=60)
        child.terminate()
        child.wait(30)
    finally:
        child.kill()
        child.wait(30)
    text = (tmp_path / "log").read_text()
    assert ("the schedule continues" in text) == (way == "cut") and "Traceback" not in text
    with db.connection() as conn:
        rows = conn.execute("SELECT job_id FROM schedule_fires").fetchall()
        jobs = conn.execute("SELECT id FROM ingest_jobs").fetchall()
    assert sorted(row["id"] for row in jobs) == sorted(row["job_id"] for row in rows)


# --- ten thousand --------------------------------------------------------------------------------


def test_ten_thousand_schedules_cost_50_ms_a_tick(db: ModuleType):
    config.register_ingest_task("prices", lambda: None)
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO schedules (name, expression, task_name, queue)"
            " SELECT 's' || n, 'every 366d', 'prices', 'fetch' FROM generate_series(1, 10000) n"
        )
    ticker = scheduler.Ticker()
    ticker.run_once()
    assert len(planned(db)) == 10_000
    # The best of many: what passes on the clock has the server's share, and that of other load.
    assert min(timeit.repeat(ticker.run_once, number=1, repeat=20)) < wait.patience(0.05)
    # A tick is one transaction, and the next is 30 s away: far less than one a second.
    assert ticker.pause_s() > 25
