"""Define `queue-workflows jobs`: list, show, retry, cancel and delete ingest jobs."""

from __future__ import annotations

import getpass
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from queue_workflows import errors
from queue_workflows import jobs as api
from queue_workflows.cli import command, ids, job_selection, options, output, run_views, show
from queue_workflows.runtime import display
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

app = typer.Typer(
    name="jobs",
    help="List and show ingest jobs, or retry, cancel or delete them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
LINES = 20
"""Jobs that are named one by one; beyond that only the counts are printed."""
_HEAD = ("job", "task", "queue", "status", "try", "created (UTC)", "")
_DONE = frozenset({"queued", "cancelled", "asked to stop", "deleted"})

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="JOB", help=f"Ids; or a filter below. {ids.HELP}")
]
Queue = Annotated[str | None, typer.Option(metavar="Q", help="Only jobs of this queue.")]
Task = Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this task.")]
Status = Annotated[
    list[str] | None,
    typer.Option(metavar="STATUS", help=f"Repeatable: {', '.join(api.STATUSES)}."),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Queued, started or ended since: 90m, 24h, 7d ago, or an ISO time (with its zone).",
    ),
]
Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="Their idempotency, lock or partition key.")
]
By = Annotated[
    str | None,
    typer.Option(metavar="WHO", help="Who does it, for the history. Default: your login."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list the jobs that it would change.")]


@app.command("list")
def list_(
    queue: Queue = None,
    task: Task = None,
    status: Status = None,
    since: Since = None,
    key: Key = None,
    limit: options.Limit = 20,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List jobs, the newest first."""

    def run_command() -> int:
        moment = job_selection.instant(since)
        with command.reading(app):
            rows = api.list(
                queue=queue, task_name=task, status=status, since=moment, key=key, limit=limit
            )
        output.dump(rows) if as_json else _table(rows)
        return 0

    command.execute("jobs list", run_command, debug=debug)


@app.command("show")
def show_(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help=f"The id of a job, or its start. {ids.HELP}")
    ],
    full: Annotated[bool, typer.Option("--full", help="Values, traces and logs uncut.")] = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show a job: its attempts with their logs, and changes by people."""

    def run_command() -> int:
        with command.reading(app):
            kind, job_id = show.found(job, "jobs show", jobs_first=True)
            if kind is None:
                return 1
            if kind == "run":
                raise errors.InvalidConfig(f"{job_id} is a run: `{command.PROG} show` shows it")
            show.print_out(show.collect(kind, job_id), as_json=as_json, full=full)
        return 0

    command.execute("jobs show", run_command, debug=debug)


@app.command("retry")
def retry(
    job: Ids = None,
    queue: Queue = None,
    task: Task = None,
    status: Status = None,
    since: Since = None,
    key: Key = None,
    by: By = None,
    dry_run: DryRun = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Queue failed or cancelled jobs again. They get all attempts; a filter means failed ones."""
    wanted = job_selection.Selection(job, queue, task, status, since, key, default=("failed",))
    _run("retry", wanted, lambda some, who: api.retry_many(some, by=who), by, dry_run,
         app=app, as_json=as_json, debug=debug)  # fmt: skip


@app.command("cancel")
def cancel(
    job: Ids = None,
    queue: Queue = None,
    task: Task = None,
    status: Status = None,
    since: Since = None,
    key: Key = None,
    by: By = None,
    dry_run: DryRun = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Cancel jobs. Waiting ones end at once, running ones are asked to stop."""
    wanted = job_selection.Selection(
        job, queue, task, status, since, key, default=("queued", "running")
    )
    running = not status or "running" in status
    _run("cancel", wanted, lambda some, who: api.cancel_many(some, running=running, by=who),
         by, dry_run, app=app, as_json=as_json, debug=debug)  # fmt: skip


@app.command("delete")
def delete(
    job: Ids = None,
    queue: Queue = None,
    task: Task = None,
    status: Status = None,
    since: Since = None,
    key: Key = None,
    by: By = None,
    dry_run: DryRun = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Delete jobs that do not run. A filter means those that are over; their history stays."""
    wanted = job_selection.Selection(
        job, queue, task, status, since, key, default=tuple(sorted(TERMINAL_RUN_STATUSES))
    )
    _run("delete", wanted, lambda some, who: api.delete_many(some, by=who), by, dry_run,
         app=app, as_json=as_json, debug=debug)  # fmt: skip


def _run(
    name: str,
    wanted: job_selection.Selection,
    act: Callable[[list[str], str], list[JsonDict]],
    by: str | None,
    dry_run: bool,
    *,
    app: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    def run_command() -> int:
        wanted.check()
        with command.reading(app):
            chosen = wanted.found()
            if dry_run:
                output.dump(chosen) if as_json else _print_ids(name, chosen)
                return 0
            done = act(chosen, by or login())
        if as_json:
            output.dump(done)
        else:
            _print_result(done)
        refused = [one for one in done if one["outcome"] not in _DONE]
        _refuse(name, refused)
        return 1 if refused else 0

    command.execute(f"jobs {name}", run_command, debug=debug)


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


def _table(rows: Sequence[Row]) -> None:
    output.table(_HEAD, [_cells(row) for row in rows])


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
