"""Carry the W3C trace context of the current span in headers; OpenTelemetry is optional."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

HEADER: Final = "traceparent"
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
own: ContextVar[SpanContext | None] = ContextVar("queue_workflows_span", default=None)
"""The span that is current without OpenTelemetry."""


class SpanContext(NamedTuple):
    """The identity of a span."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        """Return it as the value of a `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse(value: Any) -> SpanContext | None:
    """Return the context of a `traceparent`, or None for any value that is not valid."""
    found = _PARENT.fullmatch(value) if isinstance(value, str) and len(value) <= 500 else None
    if found is None or found[1] == "ff" or (found[1] == "00" and len(value) != 55):
        return None
    if not int(found[2], 16) or not int(found[3], 16):
        return None
    return SpanContext(found[2], found[3], bool(int(found[4], 16) & 1))


def with_current(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the headers with the `traceparent` of the current span, if there is one.

    A given `traceparent` is kept. Returns None if there are neither headers nor a span.
    """
    current = _current()
    if current is None or not isinstance(headers, (Mapping, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
        return headers
    if headers is not None and any(str(name).lower() == HEADER for name in headers):
        return headers
    return {**(headers or {}), HEADER: current.traceparent}


def _current() -> SpanContext | None:
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        found: Any = trace.get_current_span().get_span_context()
        if found.is_valid:
            sampled = bool(found.trace_flags & 1)
            return SpanContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", sampled)
    return own.get()


@contextlib.contextmanager
def continuing(traceparent: Any) -> Generator[None]:
    """Let jobs enqueued in the block continue the trace of a request, if its header is valid.

    A current span of OpenTelemetry takes precedence.
    """
    token = own.set(parse(traceparent))
    try:
        yield
    finally:
        own.reset(token)
