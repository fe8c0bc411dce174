"""Define `queue-workflows upgrade`: move a run from its frozen graph to today's code."""

from __future__ import annotations

from typing import Annotated

from queue_workflows import db, errors, runs
from queue_workflows.cli import command, define, ids, job_texts, jobs, options, output
from queue_workflows.types import Upgrade

SHOWN = 30
"""Nodes and edges of a kind that are printed; --json has all."""


@define.command("upgrade")
def upgrade(
    run: Annotated[str, options.argument("RUN", f"The id of a run. {ids.PREFIX_HELP}")],
    dry_run: Annotated[
        bool, options.flag("--dry-run", "Only show how the run differs from today's code.")
    ] = False,
    by: jobs.By = None,
) -> int | define.Shown:
    """Move a run to today's code, if no ended node has changed."""
    with db.transaction() as conn:
        run_id, found = ids.resolve(conn, run)
    if found is not None and found["kind"] != "run":
        raise errors.InvalidConfig(f"{run_id} is a job; name its run")
    try:
        done = runs.upgrade(run_id, dry_run=dry_run, by=by or jobs.login())
    except (errors.UpgradeRefused, errors.UnknownJob) as error:
        command.refuse("upgrade", str(error.args[0]) if error.args else str(error))
        return 1
    return define.Shown(dict(done), lambda: _print(done), int(done["outcome"] == "refused"))


def _print(done: Upgrade) -> None:
    for sign, names in (("+", done["added"]), ("-", done["removed"])):
        _lines([f"{sign} {name}" for name in names])
    _lines([f"~ {job_texts.changed_text(dict(each))}" for each in done["changed"]])
    for sign, edges in (("+", done["edges_added"]), ("-", done["edges_removed"])):
        _lines([f"{sign} {before} -> {after}" for before, after in edges])
    if done["unknown"]:
        output.echo("no live worker knows these nodes; start workers with today's code first:")
        _lines([f"  {name}" for name in done["unknown"]])
    run_id = done["run_id"]
    if done["outcome"] == "same":
        output.echo(f"run {run_id}: its graph is that of today's code")
    elif done["outcome"] == "refused":
        output.echo(f"run {run_id}: cannot move, as these nodes ended, run or are claimed:")
        _lines([f"  {name}" for name in done["blocked"]])
    elif done["outcome"] == "moved":
        output.echo(f"run {run_id}: moved to today's code; an orchestrator continues it")
    else:
        output.echo(f"run {run_id}: can move; without --dry-run it does")


def _lines(lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        output.echo(output.line(line))
    if len(lines) > SHOWN:
        output.echo(f"  and {len(lines) - SHOWN} more")
