"""Define `queue-workflows metrics`: print the page for Prometheus, or serve it."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from queue_workflows.cli import command, options
from queue_workflows.runtime import app_loading, entry_point
from queue_workflows.telemetry import metrics as page
from queue_workflows.telemetry.metrics import listener

EVERYWHERE = (
    "{} is not this machine's loopback: every client that reaches it reads the names of queues, "
    "schedules and machines without a token"
)


def metrics(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve http://HOST:PORT/metrics until SIGTERM or Ctrl-C."
        ),
    ] = None,
    app: options.App = None,
    debug: options.Debug = False,
) -> None:
    """Print the metrics for Prometheus, or serve them.

    Counters go on through restarts and `prune`: they are kept in the database.
    """

    def run_command() -> int:
        if listen is None:
            with command.reading(app):
                page.count(within_s=float("inf"))
                sys.stdout.write(page.scrape())
            return 0
        return _serve(listener.address(listen), app)

    command.execute("metrics", run_command, debug=debug)


def _serve(where: listener.Address, app: str | None) -> int:
    entry_point.setup_logging("warning")
    app_loading.load_app(app)
    if not where.is_loopback:
        command.print_message(EVERYWHERE.format(where.host))
    # The database need not answer yet: until it does, the reply is 503.
    with command.database(create=False), command.until_stopped(lambda: "stopping") as stop:
        asyncio.run(
            listener.serve(
                where,
                is_stopped=stop.requested.is_set,
                on_ready=lambda url: command.print_message(f"metrics on {url}"),
            )
        )
    return 0
