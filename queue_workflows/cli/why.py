"""`queue-workflows why JOB`: what keeps each live worker from a queued job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queue_workflows import errors, waiting
from queue_workflows.cli import command, ids, options, output, show


def why(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help=f"The id of a node or ingest job, or its start. {ids.HELP}"
        ),
    ],
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show why a job waits: what keeps each live worker from it.

    Exit code 0 when the job is not queued, or a worker will take it in its turn; 1 when no live
    worker can, or there is no such job.
    """

    def body() -> int:
        with command.reading(app):
            kind, job_id = show.found(what, "why")
            if kind is None:
                return 1
            if kind == "run":
                raise errors.InvalidConfig(
                    f"{job_id} is a run: name one of its jobs; `{command.PROG} show` lists them"
                )
            told = waiting.why(job_id)
        if told is None:
            raise errors.UnknownJob(f"{kind} {job_id!r} is gone")
        if as_json:
            output.dump(told)
        else:
            _print(told)
        return 0 if told["can_run"] or told["clause"] == "status" else 1

    command.execute("why", body, debug=debug)


def _print(told: dict[str, Any]) -> None:
    of = f", model {told['model']}" if told["model"] else ""
    output.echo(
        output.line(
            f"{told['kind']} {told['id']} ({told['name']}): {told['status']} on {told['queue']}"
            f"{of}, priority {told['priority']}"
        )
    )
    if told["detail"]:
        output.echo(output.line(told["detail"], 500))
    for row in told["workers"]:
        runs = f", runs {row['running']}" if row["running"] else ""
        where = f"{row['host_label']} pid {row['pid']} ({row['state']}{runs})"
        output.echo(output.line(f"{where}: {row['detail'] or 'it can take the job then'}", 500))
