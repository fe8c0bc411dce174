"""No change is missed that comes while a stream of changes begins."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import queue_workflows
from queue_workflows import history, jobs
from queue_workflows.service import changes
from tests.support.asgi_service import streamed


def enqueue() -> str:
    queue_workflows.configure(ingest_queues={"load.a"})
    queue_workflows.register_ingest_task("load", lambda args: None)
    return jobs.enqueue_once("load", queue="load.a", by="a test")[0]


@pytest.mark.usefixtures("db")
def test_a_change_while_a_stream_begins_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read of changes waits for the search: it must not come behind it."""
    found: list[str] = []
    replayed = threading.Event()
    replay, read = changes.replay, changes.Changes.__dict__["_read"]

    def and_then(*args: Any) -> Any:
        missed = replay(*args)
        found.append(enqueue())
        replayed.set()
        return missed

    def late(self: changes.Changes) -> Any:
        replayed.wait(1)
        return read(self)

    monkeypatch.setattr(changes, "replay", and_then)
    monkeypatch.setattr(changes.Changes, "_read", late)
    status, text = streamed(
        last=f"{int(history.feed().now.timestamp() * 1_000_000)}-i1",
        until=lambda text: bool(found) and found[0] in text,
    )
    assert (status, found[0] in text) == (200, True)
