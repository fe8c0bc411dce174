"""A collector of OpenTelemetry spans on a loopback port, and an app whose handlers make spans."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any, NamedTuple

import queue_workflows

QUEUE = "work"


class Span(NamedTuple):
    """A span as it was received."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, Any]
    status: int
    message: str
    events: list[str]
    start: int
    end: int


class Collector:
    """Receives spans; `refuse` makes it answer 503."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.refuse = False
        self.requests = 0

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of(self, job_id: str) -> list[Span]:
        """The spans of a job's attempts, each once, by their claims."""
        found = {
            span.span_id: span
            for span in self.spans
            if span.attributes.get("queue_workflows.job_id") == job_id
        }
        return sorted(found.values(), key=lambda s: s.attributes["queue_workflows.claim_no"])

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_span(each) for each in scope.spans]


def _span(given: Any) -> Span:
    attributes = {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in given.attributes
    }
    return Span(
        given.name,
        given.trace_id.hex(),
        given.span_id.hex(),
        given.parent_span_id.hex(),
        attributes,
        given.status.code,
        given.status.message,
        [each.name for each in given.events],
        given.start_time_unix_nano,
        given.end_time_unix_nano,
    )


@contextlib.contextmanager
def collecting() -> Generator[tuple[Collector, str]]:
    """Run a collector; yield it and its URL."""
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.requests += 1
            if not collector.refuse:
                collector.take(body)
            self.send_response(400 if collector.refuse else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def context_of() -> dict[str, Any]:
    """Return the span that is current in a handler."""
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    return {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}


def traced() -> dict[str, Any]:
    return context_of()


async def traced_async() -> dict[str, Any]:
    return context_of()


def dies(*, token: str) -> None:
    """Is killed, as by the kernel when memory is full."""
    del token
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fails(*, token: str) -> None:
    raise ValueError(f"token={token}")


def setup() -> None:
    queue_workflows.configure(ingest_queues={QUEUE})
    for task in (traced, traced_async, dies, fails):
        queue_workflows.register_ingest_task(task.__name__, task)
    queue_workflows.register_node("traced", traced)
    queue_workflows.set_workflow_provider(
        lambda _: {
            "name": "two",
            "steps": [{"id": "s", "kind": "pipeline", "pipeline": "p"}],
        },
        lambda _: {
            "name": "p",
            "nodes": [
                {"id": "a", "node": "traced"},
                {"id": "b", "node": "traced", "depends_on": ["a"]},
            ],
        },
    )
