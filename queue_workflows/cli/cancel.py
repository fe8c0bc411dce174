"""Define `queue-workflows cancel`: end a run, a node job or an ingest job."""

from __future__ import annotations

from typing import Any

from queue_workflows import db, jobs, runs
from queue_workflows.admin import overview
from queue_workflows.cli import changed_work, command, ids, options, output
from queue_workflows.db import statements
from queue_workflows.types import Row


def cancel(
    what: ids.RunOrJob,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Cancel a run or a job. Waiting work ends at once, running work is asked to stop."""

    def run_command() -> int:
        with command.reading(app):
            done = cancelled(what)
        if as_json:
            output.dump(done)
        _print_result(done, quiet=as_json)
        return 0 if done["outcome"] in ("cancelled", "asked to stop") else 1

    command.execute("cancel", run_command, debug=debug)


def cancelled(any_id: str) -> dict[str, Any]:
    """Cancel the run or job with this id; return the outcome with the keys of `--json`.

    `outcome`: `cancelled`, `asked to stop` (a running job), `already over` or `unknown`.
    `stopping`: the jobs that still run, each with its worker. `nodes`: a run's nodes by status.
    Raises `AmbiguousId` for a prefix of several ids.
    """
    # In one transaction: a worker stops within milliseconds of the commit, and would not be listed.
    with db.transaction() as conn:
        any_id, found = ids.resolve(conn, any_id)
        if found is None:
            return _done(any_id, "unknown")
        act = runs.cancel if found["kind"] == "run" else jobs.cancel
        row = act(any_id, conn=conn)
        if row is None:
            outcome = "already over"
        else:
            outcome = "cancelled" if row["status"] == "cancelled" else "asked to stop"
        return _done(any_id, outcome) | _found(conn, any_id)


def _done(any_id: str, outcome: str) -> dict[str, Any]:
    return {
        "id": any_id, "kind": None, "name": None, "run_id": None, "outcome": outcome,
        "status": None, "run_status": None, "stopping": [], "nodes": {},
    }  # fmt: skip


def _found(conn: db.Connection, any_id: str) -> dict[str, Any]:
    done = changed_work.state(conn, any_id)
    done["stopping"] = statements.overview.running_under(conn, id=any_id)
    if done["kind"] == "run":
        done["nodes"] = overview.node_counts(conn, any_id)
    return done


def _print_result(done: dict[str, Any], *, quiet: bool) -> None:
    """Print one line about the result; to stderr with `--json`, or if nothing was cancelled."""
    if done["outcome"] == "unknown":
        command.refuse("cancel", f"there is no run or job {done['id']!r}")
        return
    what = changed_work.named(done)
    if done["outcome"] == "already over":
        command.refuse("cancel", f"{what} is already over: {done['status']}")
    if quiet:
        return
    if done["outcome"] != "already over":
        output.echo(f"{what}: {done['outcome']}{_rest(done)}")
    for job in done["stopping"]:
        output.echo(f"  {output.line(job['name'])} was asked to stop, runs on {_worker(job)}")


def _rest(done: dict[str, Any]) -> str:
    if done["kind"] == "node job":
        return f"; run {done['run_id']} is {done['run_status']}"
    counts = ", ".join(f"{n} {status}" for status, n in sorted(done["nodes"].items()))
    return f"; nodes: {counts}" if counts else ""


def _worker(job: Row) -> str:
    pid = f" pid {job['pid']}" if job["pid"] else ""
    return output.line(f"{job['host_label'] or 'an unknown host'} {job['queue']}{pid}")
