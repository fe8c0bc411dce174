"""Define `queue-workflows cancel` and `retry`: end a run or job, or run it again."""

from __future__ import annotations

from typing import Annotated, Any

from queue_workflows import db, errors, jobs, runs
from queue_workflows.admin import overview
from queue_workflows.cli import command, define, ids, options, output
from queue_workflows.db import statements
from queue_workflows.types import Row


@define.command("cancel")
def cancel(what: ids.RunOrJob) -> define.Shown:
    """Cancel a run or a job. Waiting work ends at once, running work is asked to stop."""
    done = cancelled(what)
    if done["outcome"] == "unknown":
        command.refuse("cancel", f"there is no run or job {done['id']!r}")
    elif done["outcome"] == "already over":
        command.refuse("cancel", f"{_named(done)} is already over: {done['status']}")
    is_done = done["outcome"] in ("cancelled", "asked to stop")
    return define.Shown(done, lambda: _print_cancelled(done), 0 if is_done else 1)


@define.command("retry")
def retry(
    what: ids.RunOrJob,
    from_node: Annotated[
        str | None,
        options.option(
            "NODE", "For a run: run this node and all that depends on it again.", "--from"
        ),
    ] = None,
    from_step: Annotated[
        str | None,
        options.option(
            "NAME", "For a job: do this step and all that began after it again.", "--from-step"
        ),
    ] = None,
) -> define.Shown:
    """Run failed or cancelled work again. Completed nodes and steps keep their outputs."""
    done = retried(what, from_node=from_node, from_step=from_step)
    is_queued = done["outcome"] == "queued"
    if done["outcome"] == "unknown":
        command.refuse("retry", f"there is no run or job {done['id']!r}")
    elif not is_queued:
        command.refuse("retry", f"{_named(done)}: {done['reason']}")
    text = f"{_named(done)}: queued{_kept(done)}"
    return define.Shown(done, lambda: is_queued and output.echo(text), 0 if is_queued else 1)


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
            return _done(any_id, "unknown", last={"stopping": []})
        act = runs.cancel if found["kind"] == "run" else jobs.cancel
        row = act(any_id, conn=conn)
        if row is None:
            outcome = "already over"
        else:
            outcome = "cancelled" if row["status"] == "cancelled" else "asked to stop"
        stopping = statements.overview.running_under(conn, id=any_id)
        done = _done(any_id, outcome, last={"stopping": stopping}) | _state(conn, any_id)
        if done["kind"] == "run":
            done["nodes"] = overview.node_counts(conn, any_id)
        return done


def retried(
    any_id: str, *, from_node: str | None = None, from_step: str | None = None
) -> dict[str, Any]:
    """Retry the run or job with this id; return the outcome with the keys of `--json`.

    `outcome`: `queued`, `refused` (with the `reason`; nothing was written) or `unknown`. `nodes`: a
    run's nodes by status, before its start queues those that run again. Raises `AmbiguousId` for a
    prefix of several ids.
    """
    with db.transaction() as conn:
        any_id, found = ids.resolve(conn, any_id)
        if found is None:
            return _done(any_id, "unknown", first={"reason": None})
        if from_node is not None and found["kind"] != "run":
            raise errors.InvalidConfig(
                f"--from {from_node} names a node of a run, and {any_id} is a job"
            )
        if from_step is not None and found["kind"] == "run":
            raise errors.InvalidConfig(
                f"--from-step {from_step} needs a job, and {any_id} is a run; name the job of the "
                f"node, which `{command.PROG} show {any_id} --node NODE` shows"
            )
        reason = None
        try:
            if found["kind"] == "run":
                runs.retry(any_id, from_node=from_node, conn=conn)
            else:
                jobs.retry(any_id, from_step=from_step, conn=conn)
        except (errors.InvalidConfig, errors.UnknownJob) as error:
            reason = _reason(error, found)
        done = _done(any_id, "refused" if reason else "queued", first={"reason": reason})
        done |= _state(conn, any_id)
        if done["run_id"] is not None:
            done["nodes"] = overview.node_counts(conn, done["run_id"])
        return done


def _reason(error: Exception, found: dict[str, Any]) -> str:
    if found["kind"] == "ingest job" and isinstance(error, errors.UnknownJob):
        return f"it is {found['status']}: only a failed or cancelled one is retried"
    if found["kind"] == "run" and found["status"] == "completed":
        return f"{error}: --from NODE" if "name the node" in str(error) else str(error)
    return str(error)


def _done(
    any_id: str,
    outcome: str,
    *,
    first: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the keys of `--json` in their order; `_state` fills in the ones without a value."""
    named = dict.fromkeys(("kind", "name", "run_id"))
    states = (first or {}) | dict.fromkeys(("status", "run_status")) | (last or {})
    return {"id": any_id, **named, "outcome": outcome, **states, "nodes": {}}


def _state(conn: db.Connection, any_id: str) -> dict[str, Any]:
    """Return kind, name, run_id and status of a run or job, and run_status if it has a run."""
    found = statements.overview.find(conn, id=any_id, jobs_first=False) or {}
    done: dict[str, Any] = {key: found[key] for key in ("kind", "name", "run_id", "status")}
    if done["run_id"] is not None:
        run = statements.overview.find(conn, id=done["run_id"], jobs_first=False)
        done["run_status"] = run["status"] if run else None
    return done


def _named(done: dict[str, Any]) -> str:
    """Return kind, id and name of a run or job as one text."""
    return f"{done['kind']} {done['id']} ({output.line(done['name'])})"


def _print_cancelled(done: dict[str, Any]) -> None:
    if done["outcome"] not in ("unknown", "already over"):
        output.echo(f"{_named(done)}: {done['outcome']}{_rest(done)}")
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


def _kept(done: dict[str, Any]) -> str:
    if done["kind"] in (None, "ingest job"):
        return ""
    kept = sum(done["nodes"].get(status, 0) for status in ("completed", "skipped"))
    with_run = f" with its run {done['run_id']}" if done["kind"] == "node job" else ""
    return f"{with_run}; {output.counted(kept, 'node')} kept as completed"
