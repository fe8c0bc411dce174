"""Start the exports that the settings of this process want."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from queue_workflows import config, errors
from queue_workflows.event_export import exporter, files, otlp
from queue_workflows.runtime import log_files

SPANS = ("all", "traced")


def wanted(*, spans: str | None = None, exporter_: object = None) -> list[exporter.Exporter]:
    """Return the exports of AUDIT_LOG_PATH, METRIC_PATH and SPANS; none without these.

    `spans`: instead of SPANS. Raises `InvalidConfig` for a file that cannot be written and a value
    of SPANS that does not exist, `MissingExtra` without OpenTelemetry.
    """
    found: list[exporter.Exporter] = []
    host = config.host_label()
    path = log_files.path_of(config.AUDIT_LOG_PATH, config.AUDIT_LOG_FILE_NAME)
    if path is not None:
        sink = files.AuditLog(log_files.opened(path))
        found.append(exporter.Exporter(f"audit log {host}:{path}"[:300], sink))
    path = log_files.path_of(config.METRIC_PATH, config.METRIC_FILE_NAME)
    if path is not None:
        sink = files.MetricLog(log_files.opened(path))
        found.append(exporter.Exporter(f"metric log {host}:{path}"[:300], sink))
    kind = (spans or config.SPANS.read()).lower()
    if kind and kind not in SPANS:
        raise errors.InvalidConfig(f"SPANS={kind!r:.40} must be one of {', '.join(SPANS)}")
    if kind:
        traced = otlp.Spans(only_traced=kind == "traced", exporter=exporter_)
        found.append(exporter.Exporter("spans", traced))
    return found


@contextlib.contextmanager
def running(exports: list[exporter.Exporter]) -> Generator[None]:
    """Run these exports, each on a thread of its own."""
    with contextlib.ExitStack() as stack:
        for each in exports:
            stack.enter_context(each)
        yield
