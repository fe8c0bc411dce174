"""`queue-workflows why RUN|JOB`: explain what keeps each live worker from a queued job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queue_workflows import errors, waiting
from queue_workflows.cli import command, ids, options, output, show
from queue_workflows.runtime import display


def why(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|JOB",
            help=f"The id of a run, or of a node or ingest job. {ids.PREFIX_HELP}",
        ),
    ],
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show why a job waits: what keeps each live worker from it. Of a run: each node that waits.

    Exit code 0 when nothing is queued, or a worker will take it in its turn; 1 when no live worker
    can take a job that is queued, or there is no such run or job.
    """

    def body() -> int:
        with command.reading(app):
            kind, any_id = show.found(what, "why")
            if kind is None:
                return 1
            told = waiting.why_run(any_id) if kind == "run" else waiting.why(any_id)
        if told is None:
            raise errors.UnknownJob(f"{kind} {any_id!r} is gone")
        if as_json:
            output.dump(told)
        elif kind == "run":
            _print_run(told)
        else:
            _print(told)
        jobs = told["nodes"] if kind == "run" else [told]
        return 0 if all(map(_may_run, jobs)) else 1

    command.execute("why", body, debug=debug)


def _may_run(told: dict[str, Any]) -> bool:
    """Return whether a worker will take the job, or none has to."""
    return told["can_run"] or told["clause"] in ("status", "answer", "dependencies")


def _print_run(told: dict[str, Any]) -> None:
    status = _because(told)
    _line(f"run {told['id']} ({told['name']}): {status}")
    for node in told["nodes"]:
        if node["status"] == "queued":
            _print(node)
            continue
        job = f"{node['kind']} {node['id']} ({node['name']})" if node["id"] else node["name"]
        _line(f"{job}: {node['detail']}")
        if node["clause"] == "answer":
            _line(f"  `{display.answer_command(told['id'], node['name'])}` answers it")
    if told["left_out"]:
        _line(f"and {output.counted(told['left_out'], 'node')} more that wait")
    if not told["nodes"] and not told["detail"]:
        _line("no node of it waits")


def _because(told: dict[str, Any]) -> str:
    """Return the status of a run, and what keeps the run itself waiting."""
    over = told["detail"] == f"it is {told['status']}"
    return told["status"] + (f", {told['detail']}" if told["detail"] and not over else "")


def _print(told: dict[str, Any]) -> None:
    of = f", model {told['model']}" if told["model"] else ""
    _line(
        f"{told['kind']} {told['id']} ({told['name']}): {told['status']} on {told['queue']}"
        f"{of}, priority {told['priority']}"
    )
    if told["detail"]:
        _line(told["detail"])
    for row in told["workers"]:
        runs = f", runs {row['running']}" if row["running"] else ""
        where = f"{row['host_label']} pid {row['pid']} ({row['state']}{runs})"
        _line(f"{where}: {row['detail'] or 'it can take the job then'}")


def _line(text: str) -> None:
    output.echo(output.line(text, 500))
