"""The W3C trace context: what is read, what is derived, and what handlers see."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from opentelemetry import trace

from queue_workflows import client
from queue_workflows.runtime import attempt_spans, trace_context
from tests.support import tabled

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_parent_is_read() -> None:
    assert trace_context.parse(GIVEN) == trace_context.SpanContext(TRACE, SPAN, True)
    assert trace_context.parse(f"00-{TRACE}-{SPAN}-00") == (TRACE, SPAN, False)
    assert trace_context.parse(f"cc-{TRACE}-{SPAN}-01-what-comes") == (TRACE, SPAN, True)
    assert trace_context.SpanContext(TRACE, SPAN).traceparent == GIVEN


def test_any_other_value_is_no_parent() -> None:
    cases: list[Any] = [
        None, 5, "", "00", [GIVEN], {"a": GIVEN}, GIVEN.upper(), GIVEN + "-more", GIVEN + "\n",
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-zz", " " + GIVEN, "0" * 1_000_000, f"01-{TRACE}-{SPAN}-01-{'x' * 9999}",
    ]  # fmt: skip
    for value in cases:
        with tabled.case(value):
            assert trace_context.parse(value) is None
            assert attempt_spans.of_run("r", value).trace_id == attempt_spans.derived_trace(
                "run", "r"
            )


def test_ids_are_the_same_everywhere_and_differ_by_claim() -> None:
    first = attempt_spans.of_job_attempt(None, "j", 1)
    assert first == attempt_spans.of_job_attempt(None, "j", 1)
    assert len(first.trace_id) == 32 and len(first.span_id) == 16
    second = attempt_spans.of_job_attempt(None, "j", 2)
    assert (first.trace_id, first.span_id) != second[:2]
    assert first.trace_id == second.trace_id
    assert attempt_spans.of_node_attempt("r", None, "j", 1).span_id != first.span_id
    assert attempt_spans.of_job_attempt(None, "j\0\ud800", 1).trace_id


def test_headers_without_a_span_stay_as_they_are() -> None:
    assert trace_context.with_current(None) is None
    given = {"a": "b"}
    assert trace_context.with_current(given) is given


def test_the_current_span_is_added_but_not_over_a_given_one() -> None:
    identity = trace.SpanContext(int(TRACE, 16), int(SPAN, 16), False, trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(identity)):
        assert trace_context.with_current({"a": "b"}) == {"a": "b", "traceparent": GIVEN}
        other = {"Traceparent": "x"}
        assert trace_context.with_current(other) is other
        assert trace_context.with_current("text") == "text"  # pyright: ignore


@contextlib.contextmanager
def attached(job: dict[str, Any]) -> Generator[None]:
    detach = attempt_spans.attach(job)
    yield
    if detach is not None:
        detach()


def seen() -> tuple[str, str, bool]:
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}", f"{found.span_id:016x}", found.trace_flags.sampled


def test_a_handler_has_the_span_of_its_attempt() -> None:
    job = {"id": "j", "claim_no": 2, "headers": {"traceparent": GIVEN}}
    with attached(job):
        assert seen() == (TRACE, attempt_spans.derived_span("job", "j", 2), True)
        inner = trace_context.with_current(None)
        assert inner is not None
        assert trace_context.parse(inner["traceparent"]) == seen()
    assert not trace.get_current_span().get_span_context().is_valid
    node = {"id": "n", "claim_no": 1, "run_id": "r", "node_id": "s/a"}
    with attached(node | {"run": {"traceparent": f"00-{TRACE}-{SPAN}-00"}}):
        assert seen() == (TRACE, attempt_spans.derived_span("node", "n", 1), False)


def test_without_a_trace_a_handler_has_none_unless_all_have_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {"id": "j", "claim_no": 1, "headers": {"traceparent": "x"}}
    with attached(job):
        assert not trace.get_current_span().get_span_context().is_valid
    monkeypatch.setenv("QUEUE_WORKFLOWS_SPANS", "all")
    attempt_spans.reset_for_tests()  # it is read once a second
    with attached(job):
        assert seen()[0] == attempt_spans.derived_trace("job", "j")


def test_without_opentelemetry_the_parent_still_reaches_jobs_of_a_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_spans, "_api", lambda: None)
    job = {"id": "j", "claim_no": 1, "headers": {"traceparent": GIVEN}}
    with attached(job):
        found = trace_context.with_current(None)
    assert found == {"traceparent": attempt_spans.of_job_attempt(GIVEN, "j", 1).traceparent}


def test_a_request_of_the_client_continues_the_trace_of_the_caller() -> None:
    seen: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"job_id": "j", "status": "running"})

    identity = trace.SpanContext(5, 7, False, trace.TraceFlags(1))
    with httpx.Client(transport=httpx.MockTransport(reply)) as http:
        own = client.Client("http://service", token="t0ken", http=http)
        with trace.use_span(trace.NonRecordingSpan(identity)):
            own.jobs.status("j")
    assert seen[0].headers["traceparent"] == f"00-{5:032x}-{7:016x}-01"
