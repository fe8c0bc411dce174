"""Print the recorded steps of a job, for `queue-workflows show JOB --steps`."""

from __future__ import annotations

from queue_workflows import errors, jobs
from queue_workflows.cli import command, define, output
from queue_workflows.runtime import display
from queue_workflows.types import Row

_HEAD = ("step", "key", "state", "tries", "crashes", "claim", "ended (UTC)", "")
CUT = 100
"""Characters of a result, an error or arguments that are shown without --full."""


def show(kind: str, job_id: str, *, full: bool) -> define.Shown:
    """Return the recorded steps of a job. Raises `InvalidConfig` for a run."""
    if kind == "run":
        raise errors.InvalidConfig(
            f"--steps needs the job of a node, and {job_id} is a run; "
            f"`{command.PROG} show {job_id} --node NODE` shows the job of a node"
        )
    steps = jobs.steps(job_id)

    def print_out() -> None:
        if not steps:
            output.echo(f"{kind} {job_id} has recorded no steps")
        elif full:
            _print_full(steps)
        else:
            output.table(_HEAD, map(_cells, steps))

    return define.Shown({"kind": kind, "id": job_id, "steps": steps}, print_out)


def _cells(step: Row) -> tuple[object, ...]:
    return (
        step["name"] if step["kind"] == "step" else f"{step['kind']} {step['name']}",
        step["key"],
        step["state"],
        step["attempts"],
        step["crashes"],
        step["claim_no"],
        display.moment(step["ended_at"]) if step["ended_at"] else "",
        output.line(_outcome(step), CUT),
    )


def _outcome(step: Row) -> str:
    if step["state"] == "failed":
        return step["error"] or ""
    if step["kind"] == "cursor":
        return f"{step['position']} done"
    if step["state"] == "done":
        return step["output"] or ""
    return f"until {display.moment(step['due_at'])}" if step["due_at"] else ""


def _print_full(steps: list[Row]) -> None:
    for step in steps:
        output.echo("  ".join(str(cell) for cell in _cells(step)[:-1] if cell != ""))
        for name in ("arguments", "output", "error"):
            if step[name]:
                output.echo(f"  {name}: {step[name]}")
