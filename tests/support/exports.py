"""Export the history, and mask a log, in this process as the engine's own processes do."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from queue_workflows.event_export import exporter, sinks
from queue_workflows.runtime import logs

Exporter = exporter.Exporter


def export(sink: Any, name: str = "test") -> Exporter:
    """Return an export to a sink; nothing runs it yet."""
    return exporter.Exporter(name, sink)


def spans(found: Any, *, only_traced: bool = False) -> Any:
    """Return a sink that gives spans to a `SpanExporter`."""
    return sinks.Spans(exporter=found, only_traced=only_traced)


def wanted(found: Any = None) -> list[Exporter]:
    """Return the exports that the settings name, and of all spans to this `SpanExporter`."""
    return exporter.wanted(spans="all" if found else None, exporter_=found)


@contextmanager
def masked(handler: logging.Handler) -> Generator[None]:
    """Mask secrets in what a handler logs."""
    handler.addFilter(masks := logs.MaskSecrets())
    yield
    handler.removeFilter(masks)
