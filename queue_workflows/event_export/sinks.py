"""Write the exports, which are the audit log, the metric log and spans for OpenTelemetry.

The last two have a record of each attempt, made of its events, and of each run.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import queue_workflows
from queue_workflows import errors
from queue_workflows.admin import attempt_history
from queue_workflows.runtime import (
    attempt_spans,
    display,
    logs,
    masking,
    stored_json,
    trace_context,
)
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
CHUNK: Final = 500
"""Spans of one request."""
TIMEOUT_S: Final = 10.0
_OF_EVENT = (
    "job_id", "run_id", "node_id", "queue", "claim_no", "attempt", "worker_id", "host_label",
    "elapsed_s", "error", "actor",
)  # fmt: skip
CAUSES: Final = frozenset({"death", "budget_trip", "stall_trip", "gpu_health_trip"})
"""Events that tell why an attempt ended; the event of a death may come after the end."""
_BAD: Final = frozenset({"failed", "retried", "reclaimed"})
_DEATH: Final = ("signal", "exit_code", "core", "max_rss_mb", "oom_kills", "charged", "reason")
TEXT_LIMIT: Final = 2000


# --- sinks -------------------------------------------------------------------------------------


class Sink:
    """Receives exported rows. If a method raises, the exporter sends the same rows again."""

    wants_attempts = False
    wants_events = False

    def events(self, rows: Sequence[Row]) -> None:
        """Export events of jobs; an event of a node has a `run_id`."""

    def records(self, records: Sequence[Record]) -> None:
        """Export attempts and runs that have ended."""

    def close(self) -> None:
        """Free its resources."""


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
        lines: list[str] = []
        for row in rows:
            members = {"time": row["created_at"], "event": row["event_type"]}
            members |= {name: row[name] for name in _OF_EVENT if row.get(name) is not None}
            masked = masking.mask_values(members | {"id": row["id"]})
            lines.append(display.json_line(masked) + "\n")
        self._file.write("".join(lines))


class MetricLog(_File):
    """A sink that writes each attempt and each run that has ended, with its duration, as a line."""

    wants_attempts = True

    def records(self, records: Sequence[Record]) -> None:
        lines: list[str] = []
        for record in records:
            seconds = (record.ended - record.started).total_seconds()
            members = {
                "time": record.ended,
                "name": record.name,
                **{name.rpartition(".")[2]: value for name, value in record.attributes.items()},
                "duration_s": round(seconds, 6),
                "error": record.error,
                "trace_id": record.span.trace_id,
                "span_id": record.span.span_id,
            }
            kept = {name: value for name, value in members.items() if value is not None}
            line = display.json_line(stored_json.mapping(masking.mask_values(kept)))
            lines.append(line + "\n")
        self._file.write("".join(lines))


class Spans(Sink):
    """A sink that sends spans. `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin say where to and how.

    `only_traced`: only spans of jobs and runs that were enqueued with a trace. `exporter`: any
    `SpanExporter`; by default OTLP over HTTP.
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
        # The name of the service in the environment wins over the package's.
        found = resources.OTELResourceDetector().detect().attributes
        name = found.get(resources.SERVICE_NAME) or "queue_workflows"
        named = resources.Resource({resources.SERVICE_NAME: name})
        self._resource = resources.Resource.create().merge(named)
        self._scope = instrumentation.InstrumentationScope(
            "queue_workflows", queue_workflows.__version__
        )

    def records(self, records: Sequence[Record]) -> None:
        """Send a span for each record; raise `ExportFailed` if the collector takes none now.

        A span that it refuses while it takes others is left out, so that it holds up no other.
        """
        spans = [
            self._span(each)
            for each in records
            if each.span.is_sampled and (each.is_traced or not self._only_traced)
        ]
        for start in range(0, len(spans), CHUNK):
            self._send(spans[start : start + CHUNK])

    def _send(self, spans: list[Any], taken: Any = None) -> None:
        """Send spans, in halves if need be; `taken` is one that the collector took before."""
        if self._is_taken(*spans):
            return
        if taken is None and len(spans) > 1:
            # Its replies do not tell an outage from a span that it refuses, or from a long request.
            taken = next(filter(self._is_taken, (spans[0], spans[-1])), None)
        if taken is None or (len(spans) == 1 and not self._is_taken(taken)):
            raise errors.ExportFailed(
                f"the collector does not take spans ({len(spans)} wait); see "
                "OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        if len(spans) == 1:
            name, span_id = spans[0].name, f"{spans[0].context.span_id:016x}"
            _log.warning("the collector refuses span %s (%s), which is left out", name, span_id)
            return
        middle = len(spans) // 2
        self._send(spans[:middle], taken)
        self._send(spans[middle:], taken)

    def _is_taken(self, *spans: Any) -> bool:
        return self._exporter.export(spans) is self._success

    def close(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def _span(self, record: Record) -> Any:
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


# --- records -----------------------------------------------------------------------------------


class Claim(NamedTuple):
    """A claim of a job; `run_id` and `node_id` are None outside of runs."""

    job_id: str
    claim_no: int
    run_id: str | None = None
    node_id: str | None = None


class Happening(NamedTuple):
    """An event within an attempt."""

    name: str
    at: datetime.datetime
    attributes: dict[str, Any]


class Record(NamedTuple):
    """The content of a span; `parent`: the id of the parent span; None begins a trace."""

    span: trace_context.SpanContext
    parent: str | None
    name: str
    started: datetime.datetime
    ended: datetime.datetime
    outcome: str
    error: str | None
    is_error: bool
    attributes: dict[str, Any]
    happenings: list[Happening]
    is_traced: bool
    """Whether it was enqueued with a trace."""


def ended_claims(rows: Iterable[Row]) -> list[Claim]:
    """Return the claims that these events end or explain, each once."""
    found: dict[Claim, None] = {}
    for row in rows:
        if row["event_type"] in attempt_history.ENDS | CAUSES and row["claim_no"] and row["job_id"]:
            claim = Claim(row["job_id"], row["claim_no"], row.get("run_id"), row.get("node_id"))
            found[claim] = None
    return [*found]


def of_attempt(events: Sequence[Row]) -> Record | None:
    """Return the record of one claim from its events; None while it has not ended."""
    end = next((each for each in events if each["event_type"] in attempt_history.ENDS), None)
    if end is None:
        return None
    claimed = next((each for each in events if each["event_type"] == "claimed"), None)
    if claimed is not None:
        started = min(claimed["created_at"], end["created_at"])
    else:
        seconds = min(max(stored_json.number(end["elapsed_s"]) or 0.0, 0.0), 1e8)
        started = end["created_at"] - datetime.timedelta(seconds=seconds)
    causes = [each for each in events if each["event_type"] in CAUSES]
    error = next((each["error"] for each in causes if each["error"]), None) or end["error"]
    outcome, trace = end["event_type"], end["traceparent"]
    given = trace_context.parse(trace)
    if "run_id" in end:
        run, name = attempt_spans.of_run(end["run_id"], trace), f"node {end['node_id']}"
        parent: str | None = run.span_id
        span = attempt_spans.of_node_attempt(end["run_id"], trace, end["job_id"], end["claim_no"])
    else:
        parent, name = given.span_id if given else None, f"job {end['name'] or end['queue'] or ''}"
        span = attempt_spans.of_job_attempt(trace, end["job_id"], end["claim_no"])
    attributes = _attributes(claimed or end, end, started) | _of_causes(causes)
    happenings = [
        Happening(
            _text(each["event_type"]),
            each["created_at"],
            _named({"elapsed_s": stored_json.number(each["elapsed_s"]), "error": each["error"]}),
        )
        for each in events
        if each not in (claimed, end)
    ]
    if stack := stored_json.text(stored_json.mapping(end["detail"]).get("traceback")):
        members = {"stacktrace": _text(stack, 8000), "message": _text(end["error"])}
        named = {f"exception.{name}": text for name, text in members.items()}
        happenings.append(Happening("exception", end["created_at"], named))
    return Record(
        span=span,
        parent=parent,
        name=_text(name.strip()),
        started=started,
        ended=max(started, end["created_at"]),
        outcome=outcome,
        error=_text(error) if error else None,
        is_error=outcome in _BAD or bool(causes),
        attributes=attributes | {"queue_workflows.outcome": outcome},
        happenings=happenings,
        is_traced=given is not None,
    )


def _attributes(begun: Row, end: Row, started: datetime.datetime) -> dict[str, Any]:
    since, in_run = end["waited_from"], "run_id" in end
    wait_s = None if since is None else round(max(0.0, (started - since).total_seconds()), 6)
    members = {
        "job_id": end["job_id"],
        "run_id": end.get("run_id"),
        "node_id": end.get("node_id"),
        "workflow": end["name"] if in_run else None,
        "task": None if in_run else end["name"],
        "queue": end["queue"],
        "model": end.get("model"),
        "claim_no": end["claim_no"],
        "attempt": begun["attempt"],
        "worker_id": begun["worker_id"],
        "host": begun["host_label"],
        "wait_s": wait_s,
        "handler_s": stored_json.number(end["elapsed_s"]),
    }
    return _named(members)


def _of_causes(causes: Sequence[Row]) -> dict[str, Any]:
    """Return how the attempt was ended from outside of its handler."""
    found: dict[str, Any] = {}
    for each in causes:
        found["cause"] = each["event_type"]
        if each["error"]:
            found["cause_detail"] = each["error"]
        detail = stored_json.mapping(each["detail"])
        found |= {name: detail[name] for name in _DEATH if name in detail}
    return _named(found)


def _named(members: dict[str, Any]) -> dict[str, Any]:
    return {
        f"queue_workflows.{name}": _text(value) if isinstance(value, str) else value
        for name, value in members.items()
        if isinstance(value, (str, int, float, bool))
    }


def of_run(row: Row) -> Record | None:
    """Return the record of a run that is over; None for one that was deleted."""
    if row["name"] is None:
        return None
    given = trace_context.parse(row["traceparent"])
    span = attempt_spans.of_run(row["run_id"], row["traceparent"])
    parent, generation = (given.span_id if given else None), row["generation"]
    if generation > 1:
        # The attempts of every generation are children of the first one's span.
        parent = span.span_id
        span = span._replace(span_id=attempt_spans.derived_span("run", row["run_id"], generation))
    ended = row["finished_at"] or row["started_at"] or row["created_at"]
    started = min(row["queued_at"] or row["created_at"], ended)
    members = {
        "run_id": row["run_id"],
        "workflow": row["name"],
        "generation": generation,
        "priority": row["priority"],
        "outcome": row["status"],
    }
    error = _text(row["error"]) if row["error"] else None
    failed, name = row["status"] == "failed", _text(f"run {row['name']}")
    return Record(
        span, parent, name, started, ended, row["status"], error, failed, _named(members), [],
        given is not None,
    )  # fmt: skip


def _text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a text that every exporter can encode, without secrets."""
    text = str(value or "")[: 2 * limit].encode("utf-8", "replace").decode()
    return masking.mask(text)[:limit]
