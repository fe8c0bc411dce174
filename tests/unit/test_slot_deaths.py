"""What is charged to a job whose executor died: kills for memory of its own cgroup."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from queue_workflows.executor import protocol
from queue_workflows.runtime import clock
from queue_workflows.worker import oom_kills, slot_deaths


@pytest.mark.parametrize(
    ("own", "ours", "charged"),
    [(1, 0, True), (0, 1, False), (None, 1, True), (None, 0, False), (None, None, False)],
)
def test_a_kill_for_memory_elsewhere_is_not_charged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: int | None,
    ours: int | None,
    charged: bool,
) -> None:
    counts = iter([None, None] if ours is None else [3, 3 + ours])
    monkeypatch.setattr(oom_kills, "count", lambda: next(counts))
    written: list[Any] = []
    endings: Any = SimpleNamespace(decision=lambda work: None)
    records: Any = SimpleNamespace(add_ending=lambda work, write: written.append(write))
    deaths = slot_deaths.Deaths("box", endings, records)
    handle: Any = SimpleNamespace(
        died=protocol.Died(1, None, 9, False, 7, 0.0, 0.0, False, own),
        killed_for="", lost=None, was_killed=False, tail=b"", pid=1,
    )  # fmt: skip
    work: Any = SimpleNamespace(job={"id": "j"}, lease=None, started=clock.boot_s(), ids={})
    with caplog.at_level(logging.ERROR):
        deaths.end(handle, [work])
    assert ("out of memory: killed by SIGKILL" in caplog.text) is charged
    assert len(written) == 1
