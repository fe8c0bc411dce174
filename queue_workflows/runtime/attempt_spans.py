"""Derive the ids of the spans of runs and attempts, and make an attempt's span current.

They are derived from the ids of jobs and runs. So the handler knows the id of its attempt's span,
which the exporter of the history writes after the attempt has ended.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from queue_workflows import config
from queue_workflows.runtime import trace_context

SPANS_READ_S: Final = 1.0


def derived_span(kind: str, *ids: object) -> str:
    """Return the id of a span of the history, the same in every process."""
    return _digest("span", kind, *ids)[:16]


def derived_trace(kind: str, own_id: str) -> str:
    """Return the trace id of a job or run without a trace header."""
    return _digest("trace", kind, own_id)[:32]


def _digest(*words: object) -> str:
    text = "\0".join(map(str, words))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _below(kind: str, own_id: str, traceparent: Any, span_id: str) -> trace_context.SpanContext:
    """Return the identity of a span, in the trace of the header or else of the job or run."""
    parent = trace_context.parse(traceparent)
    if parent is None:
        return trace_context.SpanContext(derived_trace(kind, own_id), span_id)
    return parent._replace(span_id=span_id)


def of_run(run_id: str, traceparent: Any) -> trace_context.SpanContext:
    """Return the identity of the span of a run."""
    return _below("run", run_id, traceparent, derived_span("run", run_id))


def of_node_attempt(
    run_id: str, traceparent: Any, job_id: str, claim_no: int
) -> trace_context.SpanContext:
    """Return the identity of the span of one claim of a node."""
    return _below("run", run_id, traceparent, derived_span("node", job_id, claim_no))


def of_job_attempt(traceparent: Any, job_id: str, claim_no: int) -> trace_context.SpanContext:
    """Return the identity of the span of one claim of a job outside of runs."""
    return _below("job", job_id, traceparent, derived_span("job", job_id, claim_no))


def attach(job: Mapping[str, Any]) -> Callable[[], object] | None:
    """Make the span of a claimed job current for its handler; return a function to undo that.

    Does nothing and returns None if neither the job nor its run has a trace header, unless SPANS is
    `all`. If OpenTelemetry is installed, the span is current there, too.
    """
    span = _span_of(job)
    if span is None:
        return None
    undo = functools.partial(trace_context.own.reset, trace_context.own.set(span))
    if (found := _api()) is None:
        return undo
    context, trace = found
    identity = trace.SpanContext(
        int(span.trace_id, 16),
        int(span.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(span.is_sampled)),
    )
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(identity)))

    def undo_both() -> None:
        context.detach(token)
        undo()

    return undo_both


def _span_of(job: Mapping[str, Any]) -> trace_context.SpanContext | None:
    in_run = "node_id" in job
    carrier: Any = job.get("run") if in_run else job.get("headers")
    given = carrier.get(trace_context.HEADER) if isinstance(carrier, dict) else None  # pyright: ignore
    known = given is not None and trace_context.parse(given) is not None
    if not known and not _read_spans(time.monotonic() // SPANS_READ_S):
        return None
    job_id, claim_no = str(job.get("id")), int(job.get("claim_no") or 0)
    if in_run:
        return of_node_attempt(str(job.get("run_id")), given, job_id, claim_no)
    return of_job_attempt(given, job_id, claim_no)


@functools.lru_cache(maxsize=1)
def _read_spans(period: float) -> bool:  # noqa: ARG001  the key of the cache
    """Return whether SPANS is `all`; a change is noticed within SPANS_READ_S seconds.

    Reading the environment costs as much as all other work for a short job's context.
    """
    return config.SPANS.read().lower() == "all"


def reset_for_tests() -> None:
    """Forget what SPANS was."""
    _read_spans.cache_clear()


@functools.cache
def _api() -> tuple[Any, Any] | None:
    try:
        return (
            importlib.import_module("opentelemetry.context"),
            importlib.import_module("opentelemetry.trace"),
        )
    except ImportError:
        return None
