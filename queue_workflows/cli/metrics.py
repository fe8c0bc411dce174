"""Define `queue-workflows metrics`: print the page for Prometheus, or serve it."""

from __future__ import annotations

import asyncio
import sys

from queue_workflows.cli import command, define
from queue_workflows.runtime import app_loading, entry_point
from queue_workflows.telemetry import metrics_listener, metrics_page

EVERYWHERE = (
    "{} is not this machine's loopback: every client that reaches it reads the names of queues, "
    "schedules and machines without a token"
)


@define.command(
    "metrics",
    "--listen HOST:PORT  Serve http://HOST:PORT/metrics until SIGTERM or Ctrl-C.",
    takes="app debug db",
    reads=False,
)
def metrics(listen: str | None = None, *, app: str | None) -> int:
    """Print the metrics for Prometheus, or serve them.

    Counters go on through restarts and `prune`: they are kept in the database.
    """
    if listen is None:
        with command.reading(app):
            metrics_page.count(within_s=float("inf"))
            sys.stdout.write(metrics_page.scrape())
        return 0
    where = metrics_listener.address(listen)
    entry_point.setup_logging("warning")
    app_loading.load_app(app)
    if not where.is_loopback:
        command.print_message(EVERYWHERE.format(where.host))
    # The database need not answer yet. Until it does, the reply is 503.
    with command.database(create=False), command.until_stopped(lambda: "stopping") as stop:
        asyncio.run(
            metrics_listener.serve(
                where,
                is_stopped=stop.requested.is_set,
                on_ready=lambda url: command.print_message(f"metrics on {url}"),
            )
        )
    return 0
