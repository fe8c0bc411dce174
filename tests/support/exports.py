"""Export the history of jobs in this process, as an orchestrator does."""

from __future__ import annotations

from typing import Any

from queue_workflows.event_export import exporter, otlp, settings

Export = exporter.Exporter
"""An export: `run` exports what is there and returns how much, `stop` lets another continue."""


def made(sink: Any, name: str = "test") -> Export:
    """Return an export to a sink, which begins with what happens after its first `run`."""
    return exporter.Exporter(name, sink)


def spans(memory: Any, *, only_traced: bool = False) -> Any:
    """Return the sink that passes attempts and runs as spans to an exporter of OpenTelemetry."""
    return otlp.Spans(exporter=memory, only_traced=only_traced)


def wanted() -> list[Export]:
    """Return the exports that the variables of this process name."""
    return settings.wanted()
