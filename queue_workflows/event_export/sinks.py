"""Write what is exported: the audit log, the metric log, and spans for OpenTelemetry."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final

import queue_workflows
from queue_workflows import errors
from queue_workflows.event_export import span_records
from queue_workflows.runtime import display, logs, masking, stored_json
from queue_workflows.types import Row

CHUNK: Final = 500
"""Spans of one request."""
TIMEOUT_S: Final = 10.0
_OF_EVENT = (
    "job_id", "run_id", "node_id", "queue", "claim_no", "attempt", "worker_id", "host_label",
    "elapsed_s", "error", "actor",
)  # fmt: skip


class Sink:
    """Takes what is exported; raises if it could not, and then gets it again."""

    wants_attempts = False
    wants_events = False

    def events(self, rows: Sequence[Row]) -> None:
        """Export events of jobs; those of nodes have a `run_id`."""

    def records(self, records: Sequence[span_records.Record]) -> None:
        """Export attempts and runs that have ended."""

    def close(self) -> None:
        """Free what it holds."""


class _File(Sink):
    """A sink that writes a line for each. Raises OSError."""

    def __init__(self, file: logs.RotatingFile) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()


class AuditLog(_File):
    """A sink that writes each event as a line of JSON."""

    wants_events = True

    def events(self, rows: Sequence[Row]) -> None:
        self._file.write("".join(map(_event_line, rows)))


class MetricLog(_File):
    """A sink that writes each attempt and each run that has ended as a line."""

    wants_attempts = True

    def records(self, records: Sequence[span_records.Record]) -> None:
        self._file.write("".join(map(_record_line, records)))


def _event_line(row: Row) -> str:
    members: dict[str, Any] = {"time": row["created_at"], "event": row["event_type"]}
    for name in _OF_EVENT:
        if row.get(name) is not None:
            members[name] = row[name]
    members["id"] = row["id"]
    return display.json_line(masking.mask_values(members)) + "\n"


def _record_line(record: span_records.Record) -> str:
    """Return what happened and how long it took, with a number for each duration."""
    given = {name.rpartition(".")[2]: value for name, value in record.attributes.items()}
    seconds = (record.ended - record.started).total_seconds()
    members = {
        "time": record.ended,
        "name": record.name,
        **given,
        "duration_s": round(seconds, 6),
        "error": record.error,
        "trace_id": record.span.trace_id,
        "span_id": record.span.span_id,
    }
    kept = {name: value for name, value in members.items() if value is not None}
    return display.json_line(stored_json.mapping(masking.mask_values(kept))) + "\n"


class Spans(Sink):
    """A sink that sends spans. `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin say where to and how.

    `only_traced`: only those of jobs and runs whose enqueuer gave a trace. `exporter`: any
    `SpanExporter`; default: that of OTLP over HTTP.
    """

    wants_attempts = True

    def __init__(self, *, only_traced: bool = False, exporter: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk import resources
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.trace import export
            from opentelemetry.sdk.util import instrumentation

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http import trace_exporter

                exporter = trace_exporter.OTLPSpanExporter(timeout=TIMEOUT_S)
        except ImportError as error:
            raise errors.MissingExtra(
                f"spans need OpenTelemetry ({error}): pip install 'SOURCE[otel]' "
                "(SOURCE is the checkout or wheel of queue_workflows)"
            ) from error
        self._only_traced = only_traced
        self._exporter = exporter
        self._success = export.SpanExportResult.SUCCESS
        self._trace, self._sdk = trace, sdk
        # The environment's name of the service, else ours.
        found = resources.OTELResourceDetector().detect().attributes
        name = found.get(resources.SERVICE_NAME) or "queue_workflows"
        named = resources.Resource({resources.SERVICE_NAME: name})
        self._resource = resources.Resource.create().merge(named)
        self._scope = instrumentation.InstrumentationScope(
            "queue_workflows", queue_workflows.__version__
        )

    def records(self, records: Sequence[span_records.Record]) -> None:
        """Send a span for each record; raise `ExportFailed` if the collector did not take it."""
        spans = [
            self._span(each)
            for each in records
            if each.span.is_sampled and (each.is_traced or not self._only_traced)
        ]
        for start in range(0, len(spans), CHUNK):
            result = self._exporter.export(spans[start : start + CHUNK])
            if result is not self._success:
                raise errors.ExportFailed(
                    f"the collector does not take spans ({len(spans)} wait); see "
                    "OTEL_EXPORTER_OTLP_ENDPOINT"
                )

    def close(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def _span(self, record: span_records.Record) -> Any:
        """Return an ended span."""
        trace, identity = self._trace, record.span
        ok = trace.StatusCode.OK if record.outcome == "completed" else trace.StatusCode.UNSET
        status = trace.Status(ok)
        if record.is_error:
            status = trace.Status(trace.StatusCode.ERROR, record.error or record.outcome)
        parent = record.parent and self._context(identity.trace_id, record.parent)
        return self._sdk.ReadableSpan(
            name=record.name,
            context=self._context(identity.trace_id, identity.span_id),
            parent=parent,
            resource=self._resource,
            attributes=record.attributes,
            events=[
                self._sdk.Event(each.name, each.attributes, _nanoseconds(each.at))
                for each in record.happenings
            ],
            kind=trace.SpanKind.CONSUMER,
            status=status,
            start_time=_nanoseconds(record.started),
            end_time=_nanoseconds(record.ended),
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: str, span_id: str) -> Any:
        flags = self._trace.TraceFlags(1)
        return self._trace.SpanContext(int(trace_id, 16), int(span_id, 16), False, flags)


def _nanoseconds(at: datetime.datetime) -> int:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    whole = (at - epoch) // datetime.timedelta(microseconds=1)
    return min(max(whole, 0) * 1000, 2**63 - 1)
