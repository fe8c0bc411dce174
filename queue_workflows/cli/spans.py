"""Define `queue-workflows spans`: send spans of attempts and runs to a collector."""

from __future__ import annotations

from queue_workflows.cli import command, define
from queue_workflows.event_export import exporter
from queue_workflows.runtime import entry_point


@define.command(
    "spans",
    "--only-traced  Only of jobs and runs whose enqueuer gave a traceparent.",
    takes="app debug db log_level log_format",
    reads=False,
)
def spans(
    only_traced: bool = False, *, app: str | None, log_level: str, log_format: str | None
) -> int:
    """Send spans of attempts and runs to a collector, until Ctrl-C.

    They are those of OpenTelemetry, one for each attempt and each run; OTEL_EXPORTER_OTLP_ENDPOINT
    names the collector. Also writes the audit log and the metric log if AUDIT_LOG_PATH and
    METRIC_PATH are set. Of several such processes one works.
    """
    entry_point.setup_logging(log_level, log_format)
    exports = exporter.wanted(spans="traced" if only_traced else "all")
    with command.until_stopped() as stop, command.reading(app) as words:
        command.print_message(f"{words}: sending spans; Ctrl-C stops it")
        with exporter.running(exports):
            stop.requested.wait()
    return 0
