"""Define `queue-workflows upgrade`: move a run from its frozen graph to today's code."""

from __future__ import annotations

from typing import Annotated

import typer

from queue_workflows import db, errors, runs
from queue_workflows.cli import command, ids, job_texts, jobs, options, output
from queue_workflows.types import Upgrade

SHOWN = 30
"""Nodes and edges of a kind that are printed; --json has all."""


def upgrade(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"The id of a run. {ids.PREFIX_HELP}")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show how the run differs from today's code.")
    ] = False,
    by: jobs.By = None,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Move a run to today's code, if no ended node has changed."""

    def run_command() -> int:
        with command.reading(app):
            with db.transaction() as conn:
                run_id, found = ids.resolve(conn, run)
            if found is not None and found["kind"] != "run":
                raise errors.InvalidConfig(f"{run_id} is a job; name its run")
            try:
                done = runs.upgrade(run_id, dry_run=dry_run, by=by or jobs.login())
            except (errors.UpgradeRefused, errors.UnknownJob) as error:
                command.refuse("upgrade", _text(error))
                return 1
        if as_json:
            output.dump(dict(done))
        else:
            _print(done)
        return 1 if done["outcome"] == "refused" else 0

    command.execute("upgrade", run_command, debug=debug)


def _text(error: Exception) -> str:
    return str(error.args[0]) if error.args else str(error)


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
