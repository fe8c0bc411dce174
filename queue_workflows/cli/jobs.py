"""Define `queue-workflows jobs` and `acts`: list and change ingest jobs, and list acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from queue_workflows import acts as act_api
from queue_workflows import db, errors
from queue_workflows import jobs as api
from queue_workflows.cli import command, define, ids, output, show, texts
from queue_workflows.requests import catalog
from queue_workflows.runtime import display
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

_HELP = "List and show ingest jobs, or retry, cancel or delete them."
app = define.group("jobs", _HELP, is_listed=False)
LINES = 20
"""Jobs that are named one by one; beyond that only the counts are printed."""
_HEAD = ("job", "task", "queue", "status", "try", "created (UTC)", "")
_DONE = frozenset({"queued", "cancelled", "asked to stop", "deleted"})


@define.command(
    "list", "--limit N 1..100000  How many at most.", app=app, operation=catalog.ListJobs
)
def list_(limit: int = 20, *, asked: JsonDict) -> define.Shown:
    """List jobs, the newest first."""
    return define.listed(api.list(limit=limit, **asked), _HEAD, _cells)


@define.command(
    "show",
    f"JOB  The id of a job. {ids.PREFIX_HELP}",
    "--full  Values, traces and logs uncut.",
    app=app,
)
def show_(job: str, full: bool = False) -> define.Shown:
    """Show a job: its attempts with their logs, and changes by people."""
    kind, job_id = ids.found(job, jobs_first=True)
    if kind == "run":
        raise errors.InvalidConfig(f"{job_id} is a run: `{command.PROG} show` shows it")
    shown = show.collect(kind, job_id)
    return define.Shown(shown, lambda: show.print_out(shown, full=full))


def _changing(
    name: str,
    doc: str,
    default: Sequence[str],
    act: Callable[[list[str], bool], list[JsonDict]],
) -> None:
    """Add a subcommand that changes jobs; `default`: the statuses of a filter without any."""

    def change(
        job: list[str] | None = None, dry_run: bool = False, *, asked: JsonDict
    ) -> define.Shown:  # fmt: skip
        if not job and not asked:
            options = "--queue, --task, --status, --since, --key, --text"
            raise errors.InvalidConfig(f"name jobs or give a filter: {options}")
        if job and asked:
            raise errors.InvalidConfig("name jobs or give a filter, not both")
        if job:
            with db.transaction() as conn:
                chosen = [ids.resolve(conn, one, jobs_first=True)[0] for one in job]
        else:
            given: dict[str, Any] = {"status": [*default], **asked}
            rows = api.list(**given, limit=None)
            chosen = [row["id"] for row in reversed(rows)]  # the oldest first
        if dry_run:
            listed = [f"would {name}: {output.counted(len(chosen), 'job')}"]
            listed += [f"  {one}" for one in chosen]
            return define.Shown(chosen, lambda: output.some(listed, LINES + 1))
        is_running = "running" in asked.get("status", ["running"])
        return outcomes(act(chosen, is_running))

    change.__doc__ = doc
    lines = f"""JOB  Ids, instead of a filter. {ids.PREFIX_HELP}
    --dry-run  Only list the jobs that it would change."""
    define.command(name, lines, takes=define.ACT, app=app, operation=catalog.ListJobs)(change)


_changing(
    "retry",
    "Queue jobs that failed or were cancelled again. A filter without --status: the failed ones.",
    ("failed",),
    lambda some, _: api.retry_many(some),
)
_changing(
    "cancel",
    "Cancel jobs. Waiting ones end at once, running ones are asked to stop.",
    ("queued", "running"),
    lambda some, running: api.cancel_many(some, running=running),
)
_changing(
    "delete",
    "Delete jobs that do not run; history stays. A filter without --status: those that are over.",
    sorted(TERMINAL_RUN_STATUSES),
    lambda some, _: api.delete_many(some),
)


def outcomes(done: Sequence[JsonDict], runs: Collection[str] = ()) -> define.Shown:
    """Return the outcomes of jobs, and of the ids in `runs` as runs."""
    if not done:
        return define.Shown(done, lambda: output.echo("no such jobs"))
    named = [f"{'run' if one['id'] in runs else 'job'} {one['id']}" for one in done]
    pairs = [*zip(named, done, strict=True)]
    refused = [f"{own}: {one['reason']}" for own, one in pairs if one["outcome"] not in _DONE]
    lines = refused[:LINES]
    lines += [f"and {len(refused) - LINES} more"] if len(refused) > LINES else []
    good = [(own, one["outcome"]) for own, one in pairs if one["outcome"] in _DONE]
    return define.Shown(done, lambda: _print_result(good), refusals=lines)


def _print_result(good: Sequence[tuple[str, str]]) -> None:
    if len(good) <= LINES:
        for own, outcome in good:
            output.echo(f"{own}: {outcome}")
    else:
        counts = Counter(outcome for _, outcome in good)
        output.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def _cells(row: Row) -> tuple[str, ...]:
    # The number of the attempt counts the failed ones, and the one that runs or succeeded.
    tries = row["attempts"] + (row["status"] in ("running", "completed"))
    return (
        row["id"], row["task_name"], row["queue"], row["status"], f"{tries}/{row['max_attempts']}",
        display.moment(row["created_at"], zone=False), _note(row),
    )  # fmt: skip


def _note(row: Row) -> str:
    if row["status"] == "queued" and row["blocked_reason"]:
        if row["blocked_reason"] == "unserved":
            return "no worker serves its queue; its lock key passed on"
        return texts.blocked(row, zone=False)
    if row["status"] == "running":
        asked = "asked to stop, " if row["cancel_requested_at"] else ""
        shown = texts.progress_text(row["progress"])
        return f"{asked}on {row['claimed_by']}{f', {shown}' if shown else ''}"
    return row["error"] or ""


_ACTS_HEAD = ("act", "at (UTC)", "who", "by way of", "did", "to", "reason", "detail")


@define.command(
    "acts",
    """--before ACT  The next page: acts before this one, the last of the page before.
    --limit N 1..100000  How many at most.""",
    operation=catalog.ListActs,
)
def acts(before: int | None = None, limit: int = 20, *, asked: JsonDict) -> define.Shown:
    """List who did what on request, the newest first."""
    rows = act_api.list(before=before, limit=limit, **asked)
    return define.listed(rows, _ACTS_HEAD, _act_cells)


def _act_cells(row: Row) -> tuple[object, ...]:
    return (
        row["id"], display.moment(row["at"], zone=False), row["actor"], row["via"], row["action"],
        f"{row['kind']} {row['subject']}", row["reason"] or "",
        output.compact(row["detail"]) if row["detail"] else "",
    )  # fmt: skip
