"""Define `queue-workflows why RUN|JOB`: explain why a job waits, or each waiting node of a run."""

from __future__ import annotations

from typing import Annotated, Any

from queue_workflows import errors, runs
from queue_workflows import jobs as job_api
from queue_workflows.cli import define, ids, options, output, show
from queue_workflows.runtime import display


@define.command("why")
def why(
    what: Annotated[
        str,
        options.argument(
            "RUN|JOB", f"The id of a run, or of a node or ingest job. {ids.PREFIX_HELP}"
        ),
    ],
) -> int | define.Shown:
    """Show why a job waits: what keeps each live worker from it. Of a run: each node that waits.

    Exit code 0 when nothing is queued, or a worker will take it in its turn; 1 when no live worker
    can take a job that is queued, or there is no such run or job.
    """
    kind, any_id = show.found(what, "why")
    if kind is None:
        return 1
    reasons = runs.explain(any_id) if kind == "run" else job_api.explain(any_id)
    if reasons is None:
        raise errors.UnknownJob(f"{kind} {any_id!r} is gone")
    jobs = reasons["nodes"] if kind == "run" else [reasons]
    printed = _print_run if kind == "run" else _print
    return define.Shown(reasons, lambda: printed(reasons), 0 if all(map(_may_run, jobs)) else 1)


def _may_run(reasons: dict[str, Any]) -> bool:
    """Return whether a worker will take the job, or none has to."""
    return reasons["can_run"] or reasons["clause"] in ("status", "answer", "child", "dependencies")


def _print_run(reasons: dict[str, Any]) -> None:
    status = _because(reasons)
    _line(f"run {reasons['id']} ({reasons['name']}): {status}")
    for node in reasons["nodes"]:
        if node["status"] == "queued":
            _print(node)
            continue
        job = f"{node['kind']} {node['id']} ({node['name']})" if node["id"] else node["name"]
        _line(f"{job}: {node['detail']}")
        if node["clause"] == "answer":
            _line(f"  `{display.answer_command(reasons['id'], node['name'])}` answers it")
    if reasons["left_out"]:
        _line(f"and {output.counted(reasons['left_out'], 'node')} more that wait")
    if not reasons["nodes"] and not reasons["detail"]:
        _line("no node of it waits")


def _because(reasons: dict[str, Any]) -> str:
    """Return the status of a run, and what keeps the run itself waiting."""
    over = reasons["detail"] == f"it is {reasons['status']}"
    return reasons["status"] + (f", {reasons['detail']}" if reasons["detail"] and not over else "")


def _print(reasons: dict[str, Any]) -> None:
    of = f", model {reasons['model']}" if reasons["model"] else ""
    _line(
        f"{reasons['kind']} {reasons['id']} ({reasons['name']}): {reasons['status']} on "
        f"{reasons['queue']}{of}, priority {reasons['priority']}"
    )
    if reasons["detail"]:
        _line(reasons["detail"])
    for row in reasons["workers"]:
        runs = f", runs {row['running']}" if row["running"] else ""
        where = f"{row['host_label']} pid {row['pid']} ({row['state']}{runs})"
        _line(f"{where}: {row['detail'] or 'it can take the job then'}")


def _line(text: str) -> None:
    output.echo(output.line(text, 500))
