"""Define `queue-workflows retry`: run a finished run, or a failed or cancelled job, again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queue_workflows import db, errors, jobs, runs
from queue_workflows.admin import overview
from queue_workflows.cli import changed_work, command, ids, options, output


def retry(
    what: ids.RunOrJob,
    from_node: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NODE",
            help="For a run: run this node and all that depends on it again.",
        ),
    ] = None,
    from_step: Annotated[
        str | None,
        typer.Option(
            "--from-step",
            metavar="NAME",
            help="For a job: do this step and all that began after it again.",
        ),
    ] = None,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Run failed or cancelled work again. Completed nodes and steps keep their outputs."""

    def run_command() -> int:
        with command.reading(app):
            done = retried(what, from_node=from_node, from_step=from_step)
        if as_json:
            output.dump(done)
        _print_result(done, quiet=as_json)
        return 0 if done["outcome"] == "queued" else 1

    command.execute("retry", run_command, debug=debug)


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
            return _done(any_id, "unknown")
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
        return _done(any_id, "refused" if reason else "queued", reason) | _found(conn, any_id)


def _reason(error: Exception, found: dict[str, Any]) -> str:
    if found["kind"] == "ingest job" and isinstance(error, errors.UnknownJob):
        return f"it is {found['status']}: only a failed or cancelled one is retried"
    if found["kind"] == "run" and found["status"] == "completed":
        return f"{error}: --from NODE" if "name the node" in str(error) else str(error)
    return str(error)


def _done(any_id: str, outcome: str, reason: str | None = None) -> dict[str, Any]:
    return {
        "id": any_id, "kind": None, "name": None, "run_id": None, "outcome": outcome,
        "reason": reason, "status": None, "run_status": None, "nodes": {},
    }  # fmt: skip


def _found(conn: db.Connection, any_id: str) -> dict[str, Any]:
    done = changed_work.state(conn, any_id)
    if done["run_id"] is not None:
        done["nodes"] = overview.node_counts(conn, done["run_id"])
    return done


def _print_result(done: dict[str, Any], *, quiet: bool) -> None:
    """Print one line about the result; to stderr with `--json`, or if nothing was retried."""
    if done["outcome"] == "unknown":
        command.refuse("retry", f"there is no run or job {done['id']!r}")
        return
    what = changed_work.named(done)
    if done["outcome"] == "refused":
        command.refuse("retry", f"{what}: {done['reason']}")
    elif not quiet:
        output.echo(f"{what}: queued{_rest(done)}")


def _rest(done: dict[str, Any]) -> str:
    if done["kind"] == "ingest job":
        return ""
    kept = sum(done["nodes"].get(status, 0) for status in ("completed", "skipped"))
    with_run = f" with its run {done['run_id']}" if done["kind"] == "node job" else ""
    return f"{with_run}; {output.counted(kept, 'node')} kept as completed"
