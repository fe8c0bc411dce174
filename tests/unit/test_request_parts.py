"""Which requests may stay open, and for how long they may wait."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows.service import request_parts
from tests.support import asgi_service, tabled


@pytest.mark.parametrize(
    ("path", "stays"),
    [
        ("/api/v1/events", True), ("/api/v1/jobs/a\nb/stream", True),
        ("/api/v1/runs/r/nodes/a/b/stream", True), ("/api/v1/jobs/a/b/stream", False),
        ("/api/v1/jobs/a/stream/x", False), ("/api/v1/runs/r/stream", False),
    ],
)  # fmt: skip
def test_only_streams_may_stay_open(path: str, stays: bool) -> None:
    asked = request_parts.of(asgi_service.scope_of(path))
    assert asked.kind == ("stream" if stays else "request")
    assert request_parts.of(asgi_service.scope_of(path, "wait=1")).kind == asked.kind
    assert asked.wait_s is None


def test_the_time_of_a_long_poll_is_the_one_that_it_names() -> None:
    cases: list[Any] = [
        ("wait=2.5", 2.5), ("w%61it=3", 3.0), ("wait=60&wait=1", 1.0), ("awaits=9", None),
        ("wait=", 0.0), ("wait=61", 0.0), ("wait=nan", 0.0), ("wait=-1", 0.0), ("wait=x", 0.0),
    ]  # fmt: skip
    for query, wait_s in cases:
        with tabled.case(query, wait_s):
            assert request_parts.of(asgi_service.scope_of("/api/v1/runs/r", query)).wait_s == wait_s


@pytest.mark.parametrize(
    ("method", "path", "wait_s"),
    [
        ("GET", "/api/v1/jobs/j/status", 9.0), ("HEAD", "/api/v1/runs/r", 9.0),
        ("GET", "/api/v1/jobs", None), ("GET", "/api/v1/runs/r/nodes", None),
        ("POST", "/api/v1/jobs/trigger", None), ("POST", "/api/v1/runs/r", None),
    ],
)  # fmt: skip
def test_only_reads_of_one_state_wait(method: str, path: str, wait_s: float | None) -> None:
    asked = request_parts.of(asgi_service.scope_of(path, "wait=9", method))
    assert (asked.wait_s, asked.kind) == (wait_s, "request" if wait_s is None else "stream")
