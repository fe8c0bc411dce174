"""Two apps on one database: neither stops, fires or replaces the schedules of the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, scheduler, schedules
from tests.support import constants, wait
from tests.support.factories import execute as rows

APP = """
import queue_workflows
from queue_workflows import schedules

queue_workflows.configure(ingest_queues={{{queue!r}}})
queue_workflows.register_ingest_task({task!r}, lambda: None)
schedules.set([
    schedules.Schedule(name, "every 1s", task_name={task!r}, queue={queue!r}, overlap="allow")
    for name in {names!r}
])
"""
START = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, db: ModuleType) -> Generator[START]:
    """Start `queue-scheduler` for an app that names these schedules; no names: without an app."""
    children: list[subprocess.Popen[str]] = []
    root = str(Path(queue_workflows.__file__).parents[1])

    def begin(app: str | None = None, *names: str) -> subprocess.Popen[str]:
        given: list[str] = []
        if app is not None:
            code = APP.format(task=f"task_{app}", queue=f"queue_{app}", names=list(names))
            (tmp_path / f"{app}.py").write_text(code)
            given = ["--app", app]
        log = (tmp_path / f"log{len(children)}").open("w")
        child = subprocess.Popen(
            [sys.executable, "-m", "queue_workflows.scheduler", *given],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait(30)


def fired(name: str) -> int:
    return len(rows(f"SELECT FROM schedule_fires WHERE name = '{name}' AND job_id IS NOT NULL"))


def gone() -> list[str]:
    found = rows("SELECT name FROM schedules WHERE gone_at IS NOT NULL ORDER BY name")
    return [row["name"] for row in found]


def stop(child: subprocess.Popen[str]) -> None:
    child.terminate()
    assert child.wait(30) == 0


def test_a_scheduler_of_another_app_or_without_one_stops_no_schedule(start: START):
    start("one", "a", "b")
    wait.until(lambda: fired("a") and fired("b"), timeout_s=30)
    start("two", "c")
    start()
    wait.until(lambda: fired("c"), timeout_s=30)
    counts = {name: fired(name) for name in ("a", "b", "c")}
    wait.until(lambda: all(fired(n) > count + 1 for n, count in counts.items()), timeout_s=30)
    assert gone() == []
    assert rows("SELECT name, error FROM schedules WHERE error IS NOT NULL") == []
    tasks = rows("SELECT DISTINCT task_name, queue FROM ingest_jobs ORDER BY 1")
    assert [(row["task_name"], row["queue"]) for row in tasks] == [
        ("task_one", "queue_one"), ("task_two", "queue_two"),
    ]  # fmt: skip


# --- in one process, with a clock that is set ---------------------------------------------------


TEN = datetime(2024, 5, 1, 10, tzinfo=timezone.utc)


def become(app: str, *wanted: schedules.Schedule) -> scheduler.Ticker:
    """A ticker of this app, which names these schedules and knows only its own task."""
    config.reset_for_tests()
    config.configure(ingest_queues={"fetch"}, app_name=app)
    config.register_ingest_task(f"task_{app}", lambda: None)
    config.set_ingest_schedule(wanted)
    return scheduler.Ticker(now_fn=lambda: TEN)


def hourly(name: str, app: str) -> schedules.Schedule:
    return schedules.Schedule(name, "every 1h", task_name=f"task_{app}", queue="fetch")


def row(name: str) -> dict[str, Any]:
    (found,) = rows(f"SELECT * FROM schedules WHERE name = '{name}'")
    return found


def test_a_name_that_two_apps_use_is_a_reported_clash_until_one_gives_it_up(
    clean_process: None, db: ModuleType, caplog: pytest.LogCaptureFixture
):
    become("one", hourly("a", "one")).run_once()
    second = become("two", hourly("a", "two"), hourly("b", "two"))
    second.run_once()
    assert "schedule 'a' exists, from code, of app 'one'" in caplog.text
    assert (row("a")["app"], row("a")["task_name"], row("a")["clash"]) == ("one", "task_one", "two")
    assert (row("b")["app"], row("b")["clash"]) == ("two", None)
    (listed,) = [one for one in schedules.list() if one["name"] == "a"]
    assert (listed["app"], listed["clash"]) == ("one", "two")
    become("two", hourly("b", "two")).run_once()
    assert row("a")["clash"] is None
    become("one").run_once()
    assert gone() == ["a"]
    become("two", hourly("a", "two"), hourly("b", "two")).run_once()
    assert (row("a")["app"], row("a")["gone_at"]) == ("two", None)


def test_a_clash_ends_without_a_restart_once_the_other_app_gives_the_name_up(
    clean_process: None, db: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    constants.put(monkeypatch, "scheduler.RETRY_S", 0.0)
    become("one", hourly("a", "one")).run_once()
    wanted = hourly("a", "two")
    second = become("two", wanted)
    second.run_once()
    assert (row("a")["app"], row("a")["clash"]) == ("one", "two")
    become("one").run_once()
    assert gone() == ["a"]
    become("two", wanted)
    second.run_once()
    assert (row("a")["app"], row("a")["clash"], gone()) == ("two", None, [])


def test_an_entry_that_is_left_out_is_still_in_the_code(clean_process: None, db: ModuleType):
    entry = scheduler.ScheduleEntry("e", 5, "task_one", "fetch")
    become("one")
    config.set_ingest_schedule([entry])
    scheduler.Ticker(now_fn=lambda: TEN).run_once()
    assert row("e")["gone_at"] is None
    config.reset_for_tests()
    config.configure(ingest_queues={"fetch"}, app_name="one")
    config.set_ingest_schedule([entry])
    scheduler.Ticker(now_fn=lambda: TEN).run_once()
    assert gone() == [], "its task is unknown, which may be an import that fails"


def test_only_an_app_with_a_name_or_a_schedule_marks_its_own_as_gone(
    clean_process: None, db: ModuleType
):
    config.configure(ingest_queues={"fetch"})
    config.register_ingest_task("task_one", lambda: None)
    config.set_ingest_schedule([hourly("a", "one"), hourly("b", "one")])
    scheduler.Ticker(now_fn=lambda: TEN).run_once()
    assert row("a")["app"], "the name of the main program"
    config.set_ingest_schedule([])
    scheduler.Ticker(now_fn=lambda: TEN).run_once()
    assert gone() == [], "a process without schedules and without an app"
    config.set_ingest_schedule([hourly("b", "one")])
    scheduler.Ticker(schedule=[hourly("b", "one")], now_fn=lambda: TEN).run_once()
    assert gone() == [], "a ticker of a part of the schedules"
    scheduler.Ticker(now_fn=lambda: TEN).run_once()
    assert gone() == ["a"]


def test_a_scheduler_neither_plans_nor_fires_a_schedule_of_the_code_of_another_app(
    clean_process: None, db: ModuleType
):
    become("one", hourly("a", "one")).run_once()
    become("one", hourly("a", "one")).run_once()
    assert row("a")["next_at"] is not None
    late = row("a")["next_at"] + timedelta(hours=3)
    become("two")
    assert scheduler.Ticker(now_fn=lambda: late).run_once() == []
    assert (fired("a"), row("a")["error"]) == (0, None)
    rows("UPDATE schedules SET next_at = NULL, wake_at = NULL RETURNING name")
    scheduler.Ticker(now_fn=lambda: late).run_once()
    assert row("a")["next_at"] is None


def test_a_scheduler_leaves_tasks_that_it_does_not_know_to_another(
    clean_process: None, db: ModuleType
):
    become("two")
    schedules.add("s", "every 1h", task_name="task_two", queue="fetch")
    clock = [TEN]
    tickers = {}
    for app in ("one", "two"):
        become(app)
        tickers[app] = scheduler.Ticker(now_fn=lambda: clock[0])

    def tick(app: str, at: timedelta) -> list[str]:
        become(app)
        clock[0] = TEN + at
        return tickers[app].run_once()

    tick("one", timedelta(0))
    assert row("s")["next_at"] == TEN + timedelta(hours=1)
    assert tick("one", timedelta(hours=1, seconds=5)) == []
    assert row("s")["error"] is None
    assert tickers["one"].pause_s() > 10, "it does not poll for what it cannot fire"
    assert len(tick("two", timedelta(hours=1, seconds=6))) == 1
    assert rows("UPDATE ingest_jobs SET status = 'cancelled', finished_at = now() RETURNING id")
    # Nobody knows the task: that is reported. Who comes to know it fires it.
    tick("one", timedelta(hours=2, minutes=2))
    assert "unknown ingest task 'task_two'" in row("s")["error"]
    assert len(tick("two", timedelta(hours=2, minutes=3))) == 1
    assert row("s")["error"] is None


def test_an_instant_that_is_overdue_when_it_is_planned_waits_for_who_knows_its_task(
    clean_process: None, db: ModuleType
):
    become("two")
    schedules.add("s", "every 10m", task_name="task_two", queue="fetch")
    rows(f"UPDATE schedules SET changed_at = '{TEN}' RETURNING name")
    clock = [TEN + timedelta(hours=5)]
    become("one")
    one = scheduler.Ticker(now_fn=lambda: clock[0])
    assert one.run_once() == one.run_once() == []
    assert row("s")["error"] is None
    become("two")
    assert len(scheduler.Ticker(now_fn=lambda: clock[0]).run_once()) == 1


def test_a_name_of_the_app_is_refused_where_it_cannot_be_stored(clean_process: None):
    for name in ("", " ", "x" * 201, "a\0b"):
        with pytest.raises(ValueError, match="app_name must have 1 to 200 characters"):
            config.configure(app_name=name)
