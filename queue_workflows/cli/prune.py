"""Define `queue-workflows prune`: delete rows that are past their retention, now."""

from __future__ import annotations

from typing import Annotated

import typer

from queue_workflows import history
from queue_workflows.cli import command, options, output


def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the runs and jobs that would be deleted.")
    ] = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Delete rows that are past their retention.

    These are finished runs and jobs, events and logs. The orchestrator does it by itself, each
    NODE_EVENT_PRUNE_INTERVAL_S.
    """

    def run_command() -> int:
        with command.reading(app) as words:
            gone = history.prunable() if dry_run else history.prune()
        if as_json:
            output.dump({"database": words, "dry_run": dry_run, "deleted": gone})
        else:
            counts = ", ".join(
                f"{kind.replace('_', ' ')} {count:,}" for kind, count in gone.items() if count
            )
            output.echo(f"{'would delete' if dry_run else 'deleted'}: {counts or 'nothing'}")
        return 0

    command.execute("prune", run_command, debug=debug)
