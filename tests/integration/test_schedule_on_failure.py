"""A schedule's own function is called for its failures, by a scheduler of its app."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, errors, node_queue, schedules
from queue_workflows.schedule import timetable
from queue_workflows.scheduler import Ticker
from tests.support.alert_senders import send
from tests.support.clocks import Clock
from tests.support.factories import execute

TEN = datetime(2024, 5, 1, 10, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
Alert = dict[str, Any]


@pytest.fixture
def calls(clean_process: None) -> list[tuple[str, Alert]]:
    for name in ("prices", "other"):
        config.register_ingest_task(name, lambda: None)
    return []


def noted(calls: list[tuple[str, Alert]], who: str) -> Callable[[Alert], None]:
    return lambda alert: calls.append((who, alert))


def declare(calls: list[tuple[str, Alert]], **more: Any) -> list[timetable.Schedule]:
    found = [
        schedules.Schedule(
            name, every="1h", task_name="prices", queue="fetch", overlap="allow",
            **({"on_failure": noted(calls, name)} | more),
        )
        for name in ("night", "day")
    ]  # fmt: skip
    schedules.set(found)
    return found


def fire(clock: Clock[datetime]) -> list[str]:
    ticker = Ticker(now_fn=clock)
    ticker.run_once()
    clock.now += HOUR
    return ticker.run_once()


def test_the_function_of_a_schedule_and_that_of_the_app_get_its_failures(
    db: ModuleType, calls: list[tuple[str, Alert]]
):
    declare(calls)
    queue_workflows.set_on_failed(noted(calls, "app"))
    send()
    clock = Clock(TEN)
    for job_id in fire(clock):
        node_queue.mark_ingest_failed(job_id, error="boom")
    send()
    assert [(who, alert["schedule"]) for who, alert in calls] == [
        ("day", "day"), ("app", "day"), ("night", "night"), ("app", "night")
    ]  # fmt: skip
    assert {(alert["kind"], alert["error"]) for _, alert in calls} == {("job", "boom")}


def test_it_needs_no_function_of_the_app_and_gets_missed_instants(
    db: ModuleType, calls: list[tuple[str, Alert]]
):
    declare(calls, catch_up="none", tz="Europe/Warsaw")
    send()
    clock = Clock(TEN)
    fire(clock)
    clock.now += 3 * HOUR + HOUR / 2
    Ticker(now_fn=clock).run_once()
    send()
    assert [(who, alert["reason"]) for who, alert in calls] == [
        ("day", "missed"), ("night", "missed")
    ]  # fmt: skip


def test_a_function_that_raises_keeps_the_others_from_nothing(
    db: ModuleType,
    calls: list[tuple[str, Alert]],
    caplog: pytest.LogCaptureFixture,
):
    def broken(alert: Alert) -> None:
        alert.clear()
        raise SystemExit(3)

    declare(calls, on_failure=broken)
    queue_workflows.set_on_failed(noted(calls, "app"))
    send()
    for job_id in fire(Clock(TEN)):
        node_queue.mark_ingest_failed(job_id, error="boom")
    with caplog.at_level(logging.ERROR):
        send()
    assert [(who, alert["error"]) for who, alert in calls] == [("app", "boom")] * 2
    assert "the failure hook raised SystemExit" in caplog.text


def test_a_run_names_the_schedule_of_its_fire_though_it_is_not_the_last(
    db: ModuleType, calls: list[tuple[str, Alert]]
):
    schedules.set([
        schedules.Schedule(
            "w", every="1h", workflow_name="nightly", overlap="allow", on_failure=noted(calls, "w")
        )
    ])  # fmt: skip
    send()
    clock = Clock(TEN)
    (first,), _ = fire(clock), fire(clock)
    execute(
        "UPDATE workflow_runs SET status = 'failed', error = 'boom', finished_at = now()"
        " WHERE id = %s",
        first,
    )
    send()
    assert [(who, alert["id"], alert["schedule"]) for who, alert in calls] == [("w", first, "w")]


def test_a_sender_of_another_app_leaves_it_to_its_own_for_a_minute(
    db: ModuleType, calls: list[tuple[str, Alert]]
):
    config.configure(app_name="ours")
    (one, _) = declare(calls)
    queue_workflows.set_on_failed(noted(calls, "app"))
    send()
    ids = fire(Clock(TEN))
    config.configure(app_name="theirs")
    schedules.set([])
    for job_id in ids:
        node_queue.mark_ingest_failed(job_id, error="boom")
    send()
    assert calls == []
    execute(
        "UPDATE failure_alerts SET failed_at = now() - interval '61 seconds' WHERE schedule = 'day'"
    )
    send()
    assert [(who, alert["schedule"]) for who, alert in calls] == [("app", "day")]
    config.configure(app_name="ours")
    schedules.set([one])
    send()
    assert [who for who, _ in calls] == ["app", "night", "app"]


def test_what_is_no_function_of_the_code_is_refused(db: ModuleType, calls: list[tuple[str, Alert]]):
    with pytest.raises(errors.InvalidConfig, match="on_failure is a function, not 'print'"):
        schedules.Schedule("s", every="1h", task_name="prices", on_failure="print")  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidConfig, match="which no table can hold"):
        schedules.add("s", every="1h", task_name="prices", queue="fetch", on_failure=print)
    assert schedules.list() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 10}, "every is a text such as '10s' or '1h30m', not 10"),
        ({"every": "10"}, "interval 'every 10': 'every' and numbers with a unit"),
        ({"every": ""}, "together 1s to 366d"),
        ({"every": "10s", "expression": "0 3 * * *"}, "give either expression or every"),
        ({}, "five fields"),
    ],
)
def test_a_wrong_interval_is_refused(calls: list[Any], options: dict[str, Any], said: str):
    with pytest.raises(errors.InvalidConfig, match=f"^schedule 's': .*{said}"):
        schedules.Schedule("s", task_name="prices", **options)


def test_every_stands_for_an_interval(db: ModuleType, calls: list[Any]):
    config.register_ingest_task("prices", task := lambda: None)
    schedules.schedule(every="10s", queue="fetch")(task)
    (one,) = config.get_config().ingest_schedule
    assert one == schedules.Schedule("prices", "every 10s", task_name="prices", queue="fetch")
    schedules.add("s", every="1h30m", task_name="prices", queue="fetch")
    assert [row["expression"] for row in schedules.list()] == ["every 1h30m"]
