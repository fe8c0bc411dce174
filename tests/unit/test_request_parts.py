"""Which requests may stay open."""

from __future__ import annotations

import pytest

from queue_workflows.service import request_parts
from tests.support import asgi_service


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
    assert (asked.stays_open, asked.is_stream) == (stays, stays)
    waits = request_parts.of(asgi_service.scope_of(path, "wait=1"))
    assert (waits.stays_open, waits.is_stream) == (stays, True)
