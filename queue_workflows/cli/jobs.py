"""Define `queue-workflows jobs`: list, show, retry, cancel and delete ingest jobs."""

from __future__ import annotations

import getpass
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

from queue_workflows import db, errors
from queue_workflows import jobs as api
from queue_workflows.cli import (
    command,
    define,
    ids,
    options,
    output,
    run_views,
    show,
)
from queue_workflows.runtime import clock, display
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

app = define.group(
    "jobs", "List and show ingest jobs, or retry, cancel or delete them.", is_listed=False
)
LINES = 20
"""Jobs that are named one by one; beyond that only the counts are printed."""
_HEAD = ("job", "task", "queue", "status", "try", "created (UTC)", "")
_DONE = frozenset({"queued", "cancelled", "asked to stop", "deleted"})

Ids = Annotated[list[str] | None, options.argument("JOB", f"Ids; or a filter below. {ids.HELP}")]
Queue = Annotated[str | None, options.option("Q", "Only jobs of this queue.")]
Task = Annotated[str | None, options.option("NAME", "Only jobs of this task.")]
Status = Annotated[
    list[str] | None, options.option("STATUS", f"Repeatable: {', '.join(api.STATUSES)}.")
]
Since = Annotated[
    str | None,
    options.option(
        "TIME", "Queued, started or ended since: 90m, 24h, 7d ago, or an ISO time (with its zone)."
    ),
]
Key = Annotated[str | None, options.option("KEY", "Their idempotency, lock or partition key.")]
By = Annotated[
    str | None, options.option("WHO", "Who does it, for the history. Default: your login.")
]
DryRun = Annotated[bool, options.flag("--dry-run", "Only list the jobs that it would change.")]


@app.command("list")
@define.command("jobs list", reads=False)
def list_(
    queue: Queue = None,
    task: Task = None,
    status: Status = None,
    since: Since = None,
    key: Key = None,
    limit: options.Limit = 20,
    *,
    app: str | None,
) -> define.Shown:
    """List jobs, the newest first."""
    moment = instant(since)
    with command.reading(app):
        rows = api.list(
            queue=queue, task_name=task, status=status, since=moment, key=key, limit=limit
        )
    return define.Shown(rows, lambda: output.table(_HEAD, map(_cells, rows)))


@app.command("show")
@define.command("jobs show")
def show_(
    job: Annotated[str, options.argument("JOB", f"The id of a job, or its start. {ids.HELP}")],
    full: Annotated[bool, options.flag("--full", "Values, traces and logs uncut.")] = False,
) -> int | define.Shown:
    """Show a job: its attempts with their logs, and changes by people."""
    kind, job_id = show.found(job, "jobs show", jobs_first=True)
    if kind is None:
        return 1
    if kind == "run":
        raise errors.InvalidConfig(f"{job_id} is a run: `{command.PROG} show` shows it")
    shown = show.collect(kind, job_id)
    return define.Shown(shown, lambda: show.print_out(shown, full=full))


def _changing(
    name: str,
    doc: str,
    default: tuple[str, ...],
    act: Callable[[list[str], str, bool], list[JsonDict]],
) -> None:
    """Add a subcommand that changes jobs; `default`: the statuses that a filter means."""

    def change(
        job: Ids = None,
        queue: Queue = None,
        task: Task = None,
        status: Status = None,
        since: Since = None,
        key: Key = None,
        by: By = None,
        dry_run: DryRun = False,
        *,
        app: str | None,
    ) -> define.Shown:
        wanted = Selection(job, queue, task, status, since, key, default=default)
        wanted.check()
        with command.reading(app):
            chosen = wanted.found()
            if dry_run:
                return define.Shown(chosen, lambda: _print_ids(name, chosen))
            done = act(chosen, by or login(), not status or "running" in status)
        refused = [one for one in done if one["outcome"] not in _DONE]
        _refuse(name, refused)
        return define.Shown(done, lambda: _print_result(done), 1 if refused else 0)

    change.__doc__ = doc
    app.command(name)(define.command(f"jobs {name}", reads=False)(change))


_changing(
    "retry",
    "Queue failed or cancelled jobs again. They get all attempts; a filter means failed ones.",
    ("failed",),
    lambda some, who, _: api.retry_many(some, by=who),
)
_changing(
    "cancel",
    "Cancel jobs. Waiting ones end at once, running ones are asked to stop.",
    ("queued", "running"),
    lambda some, who, running: api.cancel_many(some, running=running, by=who),
)
_changing(
    "delete",
    "Delete jobs that do not run. A filter means those that are over; their history stays.",
    tuple(sorted(TERMINAL_RUN_STATUSES)),
    lambda some, who, _: api.delete_many(some, by=who),
)


def instant(text: str | None) -> datetime | timedelta | None:
    """Return a time span for `90m`, `24h` or `7d`, a time for ISO text. Raises `InvalidConfig`."""
    if text is None:
        return None
    if (ago := clock.span(text)) is not None:
        return ago
    try:
        moment = clock.iso_time(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise errors.InvalidConfig(
            f"--since {text} should look like 90m, 24h, 7d, or 2026-01-31T09:00+01:00"
        )
    return moment


class Selection:
    """The jobs that a command is about: named ids, or those that a filter finds."""

    def __init__(
        self,
        given: Sequence[str] | None,
        queue: str | None,
        task: str | None,
        status: Sequence[str] | None,
        since: str | None,
        key: str | None,
        *,
        default: Sequence[str],
    ) -> None:
        self.ids = list(given or ())
        self._given = {"queue": queue, "task_name": task, "status": status or None, "key": key}
        self._since = since
        self._default = default

    def check(self) -> None:
        """Raise `InvalidConfig` for neither ids nor a filter, and for both."""
        filtered = self._since is not None or any(v is not None for v in self._given.values())
        if bool(self.ids) == filtered:
            raise errors.InvalidConfig(
                "name jobs or give a filter: --queue, --task, --status, --since, --key"
                if not filtered
                else "name jobs or give a filter, not both"
            )
        instant(self._since)

    def found(self) -> list[str]:
        """Return the ids; for a filter the oldest first."""
        if self.ids:
            with db.transaction() as conn:
                return [ids.find(conn, one)[0] for one in self.ids]
        given: dict[str, Any] = {"status": list(self._default)}
        given |= {name: value for name, value in self._given.items() if value is not None}
        rows = api.list(**given, since=instant(self._since), limit=None)
        return [row["id"] for row in reversed(rows)]


def login() -> str:
    """Return `ann@db-1`: login and machine of the user who runs the command."""
    try:
        login = getpass.getuser()
    except (KeyError, OSError):
        login = "somebody"  # a container's number without a name
    return f"{login}@{socket.gethostname()}"


def _print_result(done: Sequence[JsonDict]) -> None:
    good = [one for one in done if one["outcome"] in _DONE]
    if len(good) <= LINES:
        for one in good:
            output.echo(f"job {one['id']}: {one['outcome']}")
    else:
        counts = Counter(one["outcome"] for one in good)
        output.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if not done:
        output.echo("no such jobs")


def _refuse(name: str, refused: Sequence[JsonDict]) -> None:
    lines = [f"job {one['id']}: {one['reason']}" for one in refused[:LINES]]
    if len(refused) > LINES:
        lines.append(f"and {len(refused) - LINES} more")
    for text in lines:
        command.refuse(f"jobs {name}", text)


def _print_ids(name: str, chosen: Sequence[str]) -> None:
    output.echo(f"would {name}: {output.counted(len(chosen), 'job')}")
    for one in chosen[:LINES]:
        output.echo(f"  {output.line(one)}")
    if len(chosen) > LINES:
        output.echo(f"  and {len(chosen) - LINES} more")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["id"],
        row["task_name"],
        row["queue"],
        row["status"],
        f"{_tries(row)}/{row['max_attempts']}",
        display.moment(row["created_at"], zone=False),
        _note(row),
    )


def _tries(row: Row) -> int:
    """Return the number of the attempt: the failed ones, and the one that runs or succeeded."""
    return row["attempts"] + (row["status"] in ("running", "completed"))


def _note(row: Row) -> str:
    if row["status"] == "queued" and row["blocked_reason"]:
        at = row["available_at"]
        due = f" until {display.moment(at, zone=False)}" if at else ""
        if row["blocked_reason"] == "unserved":
            return "no worker serves its queue; its lock key passed on"
        return row["blocked_reason"].replace("_", " ") + due
    if row["status"] == "running":
        asked = "asked to stop, " if row["cancel_requested_at"] else ""
        shown = run_views.progress_text(row["progress"])
        return f"{asked}on {row['claimed_by']}{f', {shown}' if shown else ''}"
    return row["error"] or ""
