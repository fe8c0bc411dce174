"""Define `queue-workflows queues`, `schedules` and `events`, with subcommands of the catalog."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from datetime import datetime
from typing import Any, TypeVar

import typer

from queue_workflows import config, errors
from queue_workflows import events as event_api
from queue_workflows import queues as queue_api
from queue_workflows import schedules as schedule_api
from queue_workflows.cli import define, output, texts
from queue_workflows.requests import catalog, request
from queue_workflows.runtime import clock, display, stored_json
from queue_workflows.schedule import expression as expressions
from queue_workflows.types import JsonDict, Row

R = TypeVar("R", bound=request.Request[Any])


def _add(app: typer.Typer, name: str, kind: type[R], shown: Callable[[R], define.Shown]) -> None:
    """Add the subcommand that carries out an operation; `shown` returns its result afterwards."""

    def function(*, asked: JsonDict) -> define.Shown:
        carried_out = kind(**asked)
        carried_out.run()
        return shown(carried_out)

    function.__doc__ = kind.summary()
    define.command(name, takes=define.ACT, app=app, operation=kind)(function)


queues = define.group("queues", "Show queues, or pause, resume or limit one.")
_QUEUES_HEAD = (
    "queue", "state", "running", "ready", "limited", "not due", "oldest", "in/min", "out/min",
    "limits",
)  # fmt: skip


def list_queues(queue: str | None = None) -> define.Shown:
    """List queues with their depth, age, rates, state and limits."""
    # A queue that is named is listed also if it is not used.
    rows = queue_api.list(used_only=True) if queue is None else [queue_api.get(queue)]
    return define.Shown(rows, lambda: _print_queues(rows))


define.command("list", "QUEUE  Only this queue; default: all.", app=queues)(list_queues)
_add(queues, "pause", catalog.PauseQueue, lambda asked: list_queues(asked.queue))
_add(queues, "resume", catalog.ResumeQueue, lambda asked: list_queues(asked.queue))
_add(queues, "limit", catalog.LimitQueue, lambda asked: list_queues(asked.queue))


def _print_queues(rows: list[Row]) -> None:
    if not rows:
        output.echo("no queue is in use; with --app those of an app are listed, too")
        return
    output.table(_QUEUES_HEAD, map(_queue_cells, rows))
    for row in rows:
        for one in row["partitions"]:
            text = f"{row['queue']}, partition {one['partition']}: {_queue_state(one)}"
            output.echo(output.line(output.listed(text, _limits(one))))


def _queue_cells(row: Row) -> tuple[object, ...]:
    held = row["limited"] + row["locked"]
    return (
        row["queue"], _queue_state(row), row["running"], row["ready"], held, row["not_due"],
        output.seconds(row["oldest_s"]), f"{row['in_per_min']:g}", f"{row['out_per_min']:g}",
        _limits(row),
    )  # fmt: skip


def _queue_state(row: Row) -> str:
    is_open = row["state"] == "open"
    return "open" if is_open else texts.paused(row["paused_until"], row["paused_by"])


def _limits(row: Row) -> str:
    most, rate = row.get("partition_max_running"), row.get("partition_rate")
    each = output.listed(most and f"{most} at once", rate)
    at_once = row["max_running"] and f"{row['max_running']} at once"
    return output.listed(at_once, row["rate"], each and f"each partition {each}")


_HELD_BACK = {
    "overlap": "nothing queued: the last job or run is not over",
    "idempotency key": "nothing queued: another job has the idempotency key",
}
_WEEK, _YEAR = 7.0, 366.0
_HEAD = ("schedule", "expression", "zone", "runs", "next", "last", "state")
_NAME = "NAME  The name of a schedule."

schedules = define.group("schedules", "List, add, pause, fire, preview or remove schedules.")


@define.command("list", "NAME  Only this schedule; default: all.", app=schedules)
def list_(name: str | None = None) -> define.Shown:
    """List schedules, the next to fire first."""
    rows = schedule_api.list()
    if name is not None and name not in (known := [row["name"] for row in rows]):
        raise errors.UnknownSchedule(f"no schedule {name!r:.220}{errors.hint(name, known)}")
    return _shown(name, rows)


def _shown(name: str | None, rows: list[Row]) -> define.Shown:
    chosen = [row for row in rows if name in (None, row["name"])]
    return define.listed(chosen, _HEAD, _cells)


@define.command(
    "add",
    _NAME,
    """EXPRESSION  When it fires, such as '0 3 * * 1-5' or 'every 1h'.
    --task  The task to queue.
    --workflow  The workflow to submit.
    --tz  The time zone of the expression.
    --queue  The queue of the job.
    --args JSON  The args of the task, or the inputs of the workflow.
    --priority  The priority of the job or run; lower is sooner.
    --idempotency-key KEY  The key of the job; the instant replaces {fire_at} in it.
    --headers JSON  Headers of the job.
    --catch-up WHICH none|last|all  Which of the missed instants fire.
    --catch-up-max  How many missed instants --catch-up all fires at most.
    --catch-up-within-s  How many seconds old the instants of --catch-up all may be.
    --overlap POLICY allow|skip|replace|queue  How it fires if the last job or run is not over.
    --jitter-s  How many seconds the start may be delayed, chosen at random.
    --start-at TIME  The first time at which it may fire; in --tz if it has no zone.
    --end-at TIME  The last time at which it may fire; in --tz if it has no zone.""",
    takes=define.ACT,
    app=schedules,
)
def add(
    name: str, expression: str, task: str | None = None, workflow: str | None = None,
    tz: str = "UTC", queue: str | None = None, args: str | None = None, priority: int | None = None,
    idempotency_key: str | None = None, headers: str | None = None, catch_up: str = "last",
    catch_up_max: int = 100, catch_up_within_s: float = 86_400.0, overlap: str = "skip",
    jitter_s: float = 0.0, start_at: str | None = None, end_at: str | None = None,
) -> define.Shown:  # fmt: skip
    """Add a schedule, or replace the definition of the one of this name."""
    if (task is None) == (workflow is None):
        raise errors.InvalidConfig("give --task or --workflow, and not both")
    given = define.parsed("--args", _json, args)
    target: dict[str, Any] = {"task_name": task, "args": given}
    if workflow is not None:
        target = {"workflow_name": workflow, "inputs": given}
    with _naming_app():
        schedule_api.add(
            name, expression, tz=tz, queue=queue, priority=priority,
            idempotency_key=idempotency_key,
            headers=define.parsed("--headers", _json, headers),
            catch_up=catch_up, catch_up_max=catch_up_max, catch_up_within_s=catch_up_within_s,
            overlap=overlap, jitter_s=jitter_s, start_at=_time("--start-at", start_at, tz),
            end_at=_time("--end-at", end_at, tz), **target,
        )  # fmt: skip
    return _shown(name, schedule_api.list())


for _name, _kind in (("pause", catalog.PauseSchedule), ("resume", catalog.ResumeSchedule)):
    _add(schedules, _name, _kind, lambda asked: _shown(asked.name, schedule_api.list()))


@define.command("run-now", _NAME, takes=define.ACT, app=schedules)
def run_now(name: str) -> define.Shown:
    """Fire a schedule now."""
    with _naming_app():
        fired = schedule_api.fire_now(name)
    text = fired.id or _HELD_BACK.get(fired.skipped or "", "nothing queued")
    return define.Shown(fired._asdict(), lambda: output.echo(text))


@define.command(
    "preview",
    _NAME,
    """--year  A year instead of a week.
    --limit 1..1000000  The most instants.""",
    app=schedules,
)
def preview(name: str, year: bool = False, limit: int = 10_000) -> define.Shown:
    """Show the coming instants, and which of them a change of the clock moves, drops or doubles."""
    found = schedule_api.preview(name, days=_YEAR if year else _WEEK, limit=limit + 1)
    if len(found) > limit:
        output.complain(f"these are the first {limit}: --limit N shows more")
    shown = [one._asdict() for one in found[:limit]]

    def show() -> None:
        output.table(("at (UTC)", "note"), [(one["at"], one["note"] or "") for one in shown])
        if not shown:
            output.complain(f"none: preview looks {_WEEK:.0f} days ahead, or with --year a year")

    return define.Shown(shown, show)


@define.command("remove", _NAME, takes=define.ACT, app=schedules)
def remove(name: str) -> define.Shown:
    """Remove a schedule of the database."""
    schedule_api.remove(name)
    return define.Shown([], lambda: None)


@contextlib.contextmanager
def _naming_app() -> Generator[None]:
    """Add a hint at --app to the error of an unknown queue or task, if no app was named."""
    try:
        yield
    except (errors.UnknownQueue, errors.UnknownTask) as error:
        if config.get_config().app:
            raise
        raise type(error)(f"{error}; --app names the app that has it") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        given = output.line(text, 60)
        raise errors.InvalidConfig(
            f"{given} is not JSON: {error}; a text needs quotes: '\"yes\"'"
        ) from None


def _time(option: str, text: str | None, tz: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = clock.iso_time(text)
    except ValueError:
        raise errors.InvalidConfig(
            f"{option} {text!r:.40} is no ISO time such as 2026-03-01T06:00 or 2026-03-01T05:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=expressions.load_zone(tz))


def _cells(row: Row) -> tuple[object, ...]:
    runs = row["task_name"] or row["workflow_name"]
    last = row["last_fire_at"] or "-"
    return (
        row["name"], row["expression"], row["tz"], runs, row["next_fire_at"] or "-", last,
        _state(row),
    )  # fmt: skip


def _state(row: Row) -> str:
    """Return the most important fact about the queue for a person."""
    if row["gone_at"] is not None:
        return "gone from the code"
    if row["paused"]:
        return "paused"
    if (found := schedule_api.problem(row)) is not None:
        return found
    state = row["last_status"] or ("no instant is left" if row.get("ended") else "-")
    if not (found := row["changes"]):
        return state
    # Which fields the code has changed; a role may have stored anything there.
    names = stored_json.mapping(found) or ["what cannot be read"]
    return f"{state}; changed: {', '.join(sorted(names))}"


events = define.group("events", "List and send the events that handlers wait for.", is_listed=False)
CUT = 100
"""Characters of a value that the list shows."""
_EVENTS_HEAD = ("event", "key", "sent (UTC)", "value")


@define.command(
    "list", "NAME  Only events of this name.", "--limit N 1..100000  How many at most.", app=events
)
def list_events(name: str | None = None, limit: int = 20) -> define.Shown:
    """List events, the newest first."""
    return define.listed(event_api.list(name, limit=limit), _EVENTS_HEAD, _event_cells)


def _event_cells(row: Row) -> tuple[str, ...]:
    at, value = display.moment(row["created_at"]), output.line(row["value"], CUT)
    return row["name"], row["key"], at, value


@define.command(
    "send",
    """NAME  What the handlers wait for.
    --key KEY  Tells events of one name apart, such as the id of an order.
    --value JSON  What the handlers get.""",
    app=events,
)
def send(name: str, key: str | None = None, value: str = "null") -> define.Shown:
    """Send an event. Exit code 1 if one of this name and key was sent before."""
    is_first = event_api.send(name, key=key, value=define.parsed("--value", _json, value))
    done = {"name": name, "key": key or "", "sent": is_first}
    if not is_first:
        with_key = f"with key {key!r}" if key else "without a key"
        return define.Shown(done, refusals=[f"event {name!r} {with_key} was sent before"])
    text = f"event {name}{f' (key {key})' if key else ''}: sent"
    return define.Shown(done, lambda: output.echo(text))
