"""Define `queue-workflows prune`: delete rows that are past their retention, now."""

from __future__ import annotations

from typing import Annotated

from queue_workflows import history
from queue_workflows.cli import define, options, output


@define.command("prune")
def prune(
    dry_run: Annotated[
        bool, options.flag("--dry-run", "Only count the runs and jobs that would be deleted.")
    ] = False,
    *,
    database: str,
) -> define.Shown:
    """Delete rows that are past their retention.

    These are finished runs and jobs, events and logs. The orchestrator does it by itself, each
    NODE_EVENT_PRUNE_INTERVAL_S.
    """
    gone = history.prunable() if dry_run else history.prune()
    counts = ", ".join(f"{kind.replace('_', ' ')} {n:,}" for kind, n in gone.items() if n)
    text = f"{'would delete' if dry_run else 'deleted'}: {counts or 'nothing'}"
    done = {"database": database, "dry_run": dry_run, "deleted": gone}
    return define.Shown(done, lambda: output.echo(text))
