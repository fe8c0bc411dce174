"""Define `queue-workflows runs`, `cancel`, `retry`, `upgrade` and `why`: list and change runs."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from typing import Any, get_args

from queue_workflows import db, errors, jobs
from queue_workflows import runs as api
from queue_workflows.admin import waiting_reasons
from queue_workflows.cli import answer, command, define, ids, output, texts
from queue_workflows.cli import jobs as job_commands
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import display
from queue_workflows.types import JsonDict, Row, RunStatus, Upgrade

STATUSES = frozenset(get_args(RunStatus))
SHOWN = 30
"""Nodes and edges of a kind that an upgrade prints; --json has all."""
PAGES = 10
"""Pages of runs that are examined at most."""
_HEAD = ("run", "workflow", "status", "created (UTC)", "nodes", "error")
_KEYS = (
    "id", "workflow_name", "status", "priority", "mode", "generation", "created_at", "started_at",
    "finished_at", "out_dir", "error", "nodes_total", "nodes",
)  # fmt: skip


@define.command(
    "runs",
    """--input NAME=VALUE|JSON  Only runs that have these inputs; repeatable.
    --limit N 1..10000  How many at most.""",
    operation=catalog.ListRuns,
)
def runs(
    input: list[str] | None = None, limit: int = 20, *, asked: JsonDict  # noqa: A002
) -> define.Shown:  # fmt: skip
    """List the newest runs with their nodes by state.

    It examines 100,000 runs at most, and says how far it went if these are not enough.
    """
    status = asked.get("status")
    if status is not None and status not in STATUSES:
        with db.transaction() as conn:
            known = STATUSES | statements.overview.runs_by_status(conn).keys()
        if status not in known:
            raise errors.InvalidConfig(f"--status {status} is none of {', '.join(sorted(known))}")
    given: dict[str, Any] = {**asked, "input": _inputs(input or [])}
    page = api.page(limit=limit, **given)
    rows = page.items
    for _ in range(PAGES - 1):
        if page.next is None or len(rows) == limit:
            break
        page = api.page(limit=limit - len(rows), before=page.next, **given)
        rows += page.items
    if page.next is not None and len(rows) < limit:
        back_to = page.next[0]
        far = f"searched {PAGES * api.EXAMINED:,} runs, back to {display.moment(back_to)}"
        command.refuse("runs", f"{far}; `--until {back_to.isoformat()}` searches earlier ones")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    listed = [{key: row[key] for key in _KEYS} for row in rows]
    return define.Shown(listed, lambda: show(rows, width))


def _inputs(words: list[str]) -> JsonDict | None:
    """Return the members of all `key=value` and JSON objects. Raises `InvalidConfig`."""
    found: JsonDict = {}
    for word in words:
        found |= catalog.json_object(word) if word.startswith("{") else answer.inputs([word])
    return found if words else None


def show(rows: list[Row], width: int | None) -> None:
    """Print a table, or lines below each run's id if it does not fit `width` columns."""
    cells = [_cells(row) for row in rows]
    columns = zip(_HEAD, *cells, strict=True)
    needed = sum(2 + max(len(output.line(cell, 60)) for cell in column) for column in columns) - 2
    if width is None or needed <= width:
        output.table(_HEAD, cells)
        return
    for run_id, workflow, status, created, nodes, error in cells:
        output.echo(run_id)
        for text in (f"{workflow}: {status}, {nodes} nodes", created, error):
            if text:
                output.echo("  " + output.line(text, max(width - 2, 20)))


def _cells(row: Row) -> tuple[str, ...]:
    total, done = row["nodes_total"], _done_nodes(row["nodes"])
    return (
        row["id"], row["workflow_name"], row["status"],
        display.moment(row["created_at"], zone=False),
        f"{done}/{total}" if total is not None else "-", row["error"] or "",
    )  # fmt: skip


def _done_nodes(counts: dict[str, int]) -> int:
    return counts.get("completed", 0) + counts.get("skipped", 0)


@define.command("cancel", ids.RUN_OR_JOB, takes=define.ACT)
def cancel(several: list[str]) -> define.Shown:
    """Cancel runs or jobs. Waiting work ends at once, running work is asked to stop."""
    if len(several) > 1:
        return _many(several, api.cancel_many, jobs.cancel_many)
    # In one transaction: a worker stops within milliseconds of the commit, and would not be listed.
    with db.transaction() as conn:
        any_id, found = ids.resolve(conn, several[0])
        if found is None:
            return _unknown(any_id, stopping=[])
        act = api.cancel if found["kind"] == "run" else jobs.cancel
        row, outcome = act(any_id, conn=conn), "already over"
        if row is not None:
            outcome = "cancelled" if row["status"] == "cancelled" else "asked to stop"
        stopping = statements.overview.running_under(conn, id=any_id)
        done = _changed(conn, any_id, outcome, stopping=stopping)
        if done["kind"] == "run":
            done["nodes"] = statements.history_rows.node_totals(conn, run_id=any_id)["counts"]
    over = [] if row is not None else [f"{_named(done)} is already over: {done['status']}"]
    return define.Shown(done, lambda: _print_cancelled(done), refusals=over)


def _print_cancelled(done: JsonDict) -> None:
    if done["outcome"] != "already over":
        counts = ", ".join(f"{n} {status}" for status, n in sorted(done["nodes"].items()))
        rest = f"; nodes: {counts}" if counts else ""
        if done["kind"] == "node job":
            rest = f"; run {done['run_id']} is {done['run_status']}"
        output.echo(f"{_named(done)}: {done['outcome']}{rest}")
    for job in done["stopping"]:
        pid = f" pid {job['pid']}" if job["pid"] else ""
        where = output.line(f"{job['host_label'] or 'an unknown host'} {job['queue']}{pid}")
        output.echo(f"  {output.line(job['name'])} was asked to stop, runs on {where}")


@define.command(
    "retry",
    ids.RUN_OR_JOB,
    """--from NODE  For a run: run this node and all that depends on it again.
    --from-step NAME  For a job: do this step and all that began after it again.""",
    takes=define.ACT,
)
def retry(
    several: list[str], from_node: str | None = None, from_step: str | None = None
) -> define.Shown:
    """Run failed or cancelled work again. Completed nodes and steps keep their outputs."""
    if len(several) > 1:
        if from_node or from_step:
            raise errors.InvalidConfig("--from and --from-step need one run or job, not several")
        return _many(several, api.retry_many, jobs.retry_many)
    with db.transaction() as conn:
        any_id, found = ids.resolve(conn, several[0])
        if found is None:
            return _unknown(any_id, reason=None)
        reason = _retried(conn, any_id, found, from_node, from_step)
        outcome = "queued" if reason is None else "refused"
        done = _changed(conn, any_id, outcome, reason=reason)
        if done["run_id"] is not None:
            totals = statements.history_rows.node_totals(conn, run_id=done["run_id"])
            done["nodes"] = totals["counts"]
    if reason is not None:
        return define.Shown(done, refusals=[f"{_named(done)}: {reason}"])
    text = f"{_named(done)}: queued"
    if done["kind"] == "node job":
        text += f" with its run {done['run_id']}"
    if done["run_id"] is not None:
        text += f"; {output.counted(_done_nodes(done['nodes']), 'node')} kept as completed"
    return define.Shown(done, lambda: output.echo(text))


def _many(
    given: list[str],
    of_runs: Callable[[list[str]], list[JsonDict]],
    of_jobs: Callable[[list[str]], list[JsonDict]],
) -> define.Shown:
    """Change several runs and jobs; return the outcome of each, in order."""
    with db.transaction() as conn:
        found = dict(ids.resolve(conn, one) for one in given)
    runs = [one for one, row in found.items() if row is not None and row["kind"] == "run"]
    done = of_runs(runs) + of_jobs([one for one in found if one not in runs])
    by_id = {one["id"]: one for one in done}
    return job_commands.outcomes([by_id[one] for one in found], runs)


def _retried(
    conn: db.Connection, any_id: str, found: Row, from_node: str | None, from_step: str | None
) -> str | None:
    """Queue a run or job again; return None, or why it is refused, with nothing written."""
    is_run = found["kind"] == "run"
    if from_node is not None and not is_run:
        text = f"--from {from_node} names a node of a run, and {any_id} is a job"
        raise errors.InvalidConfig(text)
    if from_step is not None and is_run:
        raise errors.InvalidConfig(
            f"--from-step {from_step} needs a job, and {any_id} is a run; name the job of the "
            f"node, which `{command.PROG} show {shlex.quote(any_id)} --node NODE` shows"
        )
    try:
        if is_run:
            api.retry(any_id, from_node=from_node, conn=conn)
        else:
            jobs.retry(any_id, from_step=from_step, conn=conn)
    except (errors.InvalidConfig, errors.UnknownJob, errors.IdempotencyClash) as error:
        names_node = is_run and found["status"] == "completed" and "name the node" in str(error)
        return (
            f"{error}: --from NODE" if names_node else str(error).removeprefix(f"job {any_id!r}: ")
        )
    return None


def _changed(conn: db.Connection, any_id: str, outcome: str, **more: Any) -> JsonDict:
    """Return the keys of `--json`: a run or job, its state now, and the outcome of the request.

    `outcome`: `cancelled`, `asked to stop` (a running job), `already over`; `queued`, `refused`
    (with the `reason`); `unknown`. `run_status`: of its run, if it has one. `stopping`: the jobs
    that still run, each with its worker. `nodes`: a run's nodes by status; of a retry before its
    start queues those that run again.
    """
    keys = ("kind", "name", "run_id", "status")
    found = statements.overview.find(conn, id=any_id, jobs_first=False) or dict.fromkeys(keys)
    run: Row | None = None
    if found["run_id"] is not None:
        run = statements.overview.find(conn, id=found["run_id"], jobs_first=False)
    return {
        "id": any_id, **{key: found[key] for key in keys}, "run_status": run and run["status"],
        "outcome": outcome, **more, "nodes": {},
    }  # fmt: skip


def _unknown(any_id: str, **more: Any) -> define.Shown:
    states = dict.fromkeys(("kind", "name", "run_id", "status", "run_status"))
    done: JsonDict = {"id": any_id, **states, "outcome": "unknown", **more, "nodes": {}}
    return define.Shown(done, refusals=[f"there is no run or job {any_id!r}"])


def _named(done: JsonDict) -> str:
    """Return kind, id and name of a run or job as one text."""
    return f"{done['kind']} {done['id']} ({output.line(done['name'])})"


@define.command(
    "upgrade",
    f"RUN  The id of a run. {ids.PREFIX_HELP}",
    "--dry-run  Only show how the run differs from today's code.",
    takes=define.ACT,
)
def upgrade(run: str, dry_run: bool = False) -> define.Shown:
    """Move a run to today's code, if no ended node has changed."""
    with db.transaction() as conn:
        run_id, found = ids.resolve(conn, run)
    if found is not None and found["kind"] != "run":
        raise errors.InvalidConfig(f"{run_id} is a job; name its run")
    try:
        done = api.upgrade(run_id, dry_run=dry_run)
    except (errors.UpgradeRefused, errors.UnknownJob) as error:
        raise command.Refused(str(error.args[0]) if error.args else str(error)) from None
    return define.Shown(dict(done), lambda: _print_upgrade(done), int(done["outcome"] == "refused"))


def _print_upgrade(done: Upgrade) -> None:
    for sign, names in (("+", done["added"]), ("-", done["removed"])):
        output.some([f"{sign} {name}" for name in names], SHOWN)
    output.some([f"~ {texts.changed_text(dict(each))}" for each in done["changed"]], SHOWN)
    for sign, edges in (("+", done["edges_added"]), ("-", done["edges_removed"])):
        output.some([f"{sign} {before} -> {after}" for before, after in edges], SHOWN)
    if done["unknown"]:
        output.echo("no live worker knows these nodes; start workers with today's code first:")
        output.some([f"  {name}" for name in done["unknown"]], SHOWN)
    ends = {
        "same": "its graph is that of today's code",
        "refused": "cannot move, as these nodes ended, run or are claimed:",
        "moved": "moved to today's code; an orchestrator continues it",
    }
    end = ends.get(done["outcome"], "can move; without --dry-run it does")
    output.echo(f"run {done['run_id']}: {end}")
    if done["outcome"] == "refused":
        output.some([f"  {name}" for name in done["blocked"]], SHOWN)


_SETTLED = frozenset({"status", "answer", "child", "dependencies"})
"""Reasons of waits that no worker can end."""


@define.command(
    "why",
    f"RUN|JOB  The id of a run, or of a node or ingest job; default: all jobs. {ids.PREFIX_HELP}",
)
def why(what: str | None = None) -> define.Shown:
    """Show why a job waits: what keeps each live worker from it. Of a run: each node that waits.

    Without an id: all queued jobs, grouped by queue and by the reason of the wait. Exit code 0 when
    nothing is queued, or a worker will take it in its turn; 1 when no live worker can take a job
    that is queued, or there is no such run or job.
    """
    if what is None:
        with db.transaction() as conn:
            found = waiting_reasons.groups(conn)
        settled = _SETTLED | {"items", "run_over"}
        good = all(each["can_run"] or each["clause"] in settled for each in found["groups"])
        return define.Shown(found, lambda: _print_groups(found), int(not good))
    kind, any_id = ids.found(what)
    reasons = api.explain(any_id) if kind == "run" else jobs.explain(any_id)
    if reasons is None:
        raise errors.UnknownJob(f"{kind} {any_id!r} is gone")
    waiting = reasons["nodes"] if kind == "run" else [reasons]
    # A worker will take each job, or none has to.
    fine = all(job["can_run"] or job["clause"] in _SETTLED for job in waiting)
    printed = _print_waiting_run if kind == "run" else _print_waiting
    return define.Shown(reasons, lambda: printed(reasons), int(not fine))


def _print_groups(found: JsonDict) -> None:
    for group in found["groups"]:
        count = f"{group['count']:,}{'+' if group['is_more'] else ''}"
        jobs = f"{group['kind']}{'' if count == '1' else 's'}"
        of = f", model {group['model']}" if group["model"] else ""
        detail = group["detail"] or "they wait for their turn"
        output.echo(f"{count} {jobs} of queue {group['queue']}{of}: {detail}", 500)
        since = display.moment(group["since"])
        output.echo(f"  the first: {group['job']}, the oldest since {since}")
        for each in group["workers"]:
            own = each["detail"] or "can take it in its turn"
            workers = output.counted(each["count"], "worker")
            where = output.line(", ".join(each["machines"][:3]))
            output.echo(f"  {workers} ({where}): {own}", 500)
    if found["left_out"]:
        output.echo(f"and {found['left_out']:,} jobs that wait for other reasons")
    if not found["groups"]:
        output.echo("no job waits")


def _print_waiting_run(reasons: JsonDict) -> None:
    status, detail = reasons["status"], reasons["detail"]
    because = f", {detail}" if detail and detail != f"it is {status}" else ""
    output.echo(f"run {reasons['id']} ({reasons['name']}): {status}{because}", 500)
    for node in reasons["nodes"]:
        if node["status"] == "queued":
            _print_waiting(node)
            continue
        job = f"{node['kind']} {node['id']} ({node['name']})" if node["id"] else node["name"]
        output.echo(f"{job}: {node['detail']}", 500)
        if node["clause"] == "answer":
            how = display.answer_command(reasons["id"], node["name"])
            output.echo(f"  `{how}` answers it", 500)
    if reasons["left_out"]:
        output.echo(f"and {output.counted(reasons['left_out'], 'node')} more that wait")
    if not reasons["nodes"] and not detail:
        output.echo("no node of it waits")


def _print_waiting(reasons: JsonDict) -> None:
    of = f", model {reasons['model']}" if reasons["model"] else ""
    output.echo(
        f"{reasons['kind']} {reasons['id']} ({reasons['name']}): {reasons['status']} on "
        f"{reasons['queue']}{of}, priority {reasons['priority']}", 500,
    )  # fmt: skip
    if reasons["detail"]:
        output.echo(reasons["detail"], 500)
    for row in reasons["workers"]:
        runs = f", runs {row['running']}" if row["running"] else ""
        where = f"{row['host_label']} pid {row['pid']} ({row['state']}{runs})"
        output.echo(f"{where}: {row['detail'] or 'it can take the job then'}", 500)
