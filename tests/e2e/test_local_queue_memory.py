"""The in-process queue as a real process in a cgroup whose memory it fills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import jobs, node_queue, workers
from tests.support import local_memory_app
from tests.support.memory_cgroup import memory_cgroup
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB, FULL_PCT = 200, 93.0


class Queue:
    """The process, and what it reports."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], errors: Any) -> None:
        self.folder = folder
        self.process = process
        self._errors = errors

    @property
    def stats(self) -> dict[str, Any]:
        path = self.folder / "stats"
        assert self.process.poll() is None, self.log
        return json.loads(path.read_text()) if path.exists() else {"throttled_by": None, "at": 0.0}

    @property
    def log(self) -> str:
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def throttled_at(self) -> float | None:
        """The figure by which it is throttled now."""
        text = self.stats["throttled_by"]
        return float(text.split()[2]) if text else None

    def reports(self, times: int) -> None:
        """Wait for so many statistics that are new."""
        for _ in range(times):
            before = self.stats["at"]
            until(lambda before=before: self.stats["at"] != before)

    def end(self) -> dict[str, Any]:
        (self.folder / "end").touch()
        assert self.process.wait(60) == 0, self.log
        return json.loads((self.folder / "stats").read_text())


Start = Callable[..., Queue]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the process in a cgroup; it has ended before that goes."""
    made: list[subprocess.Popen[str]] = []
    with memory_cgroup(LIMIT_MB) as cgroup, tempfile.TemporaryFile() as errors:

        def started(*first: str, **env: str) -> Queue:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.local_memory_app", str(tmp_path), *first],
                cwd=ROOT,
                env={**os.environ, "MEMORY_CHECK_INTERVAL": "0.05", **env},
                stderr=errors,
                text=True,
            )
            made.append(process)
            cgroup.add([process.pid])
            (tmp_path / "begin").touch()
            return Queue(tmp_path, process, errors)

        yield started
        for process in made:
            process.kill()
            process.wait(10)


def fills(folder: Path, **more: Any) -> str:
    args = {"folder": str(folder), "percent": FULL_PCT, **more}
    return json.dumps({"task": "fills", "args": args})


def test_a_full_container_pauses_fetch_and_pull_until_the_memory_is_free(
    start: Start, tmp_path: Path
) -> None:
    queue = start(fills(tmp_path))
    figure = until(queue.throttled_at)
    assert figure and figure >= 90
    (tmp_path / "more").touch()
    until(lambda: not (tmp_path / "more").exists())
    fetched = queue.stats["fetched"]
    queue.reports(10)
    found = queue.stats
    assert (found["finished"], found["active_jobs"], found["fetched"]) == (0, 1, fetched)
    (tmp_path / "go").touch()
    until(lambda: queue.stats["finished"] == 4)
    until(lambda: queue.stats["throttled_by"] is None)
    found = queue.end()
    assert found["throttle_seconds"]["RAM"] > 0
    assert "🚨 MEMORY THROTTLE ACTIVE: RAM at 9" in queue.log
    released = queue.log.partition("✅ MEMORY THROTTLE RELEASED after ")[2]
    assert "RAM at " in released
    assert "no job of this process runs" not in queue.log, "it was released as memory was free"


def test_memory_that_stays_full_after_the_last_job_stops_nothing(
    start: Start, tmp_path: Path
) -> None:
    queue = start(fills(tmp_path, keep=True))
    until(queue.throttled_at)
    (tmp_path / "more").touch()
    (tmp_path / "go").touch()
    until(lambda: queue.stats["finished"] == 4)
    queue.end()
    assert "no job of this process runs that could free memory: work continues" in queue.log


def test_a_file_that_is_read_again_and_again_is_no_full_memory(start: Start) -> None:
    # Not in memory, as the folders of tests may be: such a file cannot be dropped.
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        # With the memory of the process itself 94 % or so, all of it in active pages.
        args = {"path": file.name, "megabytes": LIMIT_MB * 78 // 100}
        queue = start(json.dumps({"task": "reads", "args": args}))
        until(lambda: queue.stats.get("finished") == 1, timeout_s=60)
        queue.reports(10)
        queue.end()
    assert "MEMORY THROTTLE" not in queue.log
    assert "RAM at" not in queue.log


def test_a_process_that_serves_postgresql_claims_nothing_while_its_container_is_full(
    start: Start, db: ModuleType, dsn: str, tmp_path: Path
) -> None:
    del db
    local_memory_app.setup()
    args = {"folder": str(tmp_path), "percent": FULL_PCT}
    quick = {"QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.1", "QUEUE_WORKFLOWS_CLAIM_POLL_S": "0.05"}
    name = local_memory_app.QUEUE
    large = jobs.enqueue(task_name="fills", queue=name, args=args)
    queue = start(QUEUE_WORKFLOWS_DB_URL=dsn, **quick)

    def shown() -> str:
        return next((each["throttle"] or "" for each in workers.list()), "")

    until(lambda: shown().startswith("RAM at 9"))
    late = jobs.enqueue(task_name="quick", queue=name, args={})
    queue.reports(20)
    assert status(late) == "queued"
    (tmp_path / "go").touch()
    until(lambda: (status(large), status(late)) == ("completed", "completed"))
    until(lambda: shown() == "")
    queue.end()
    assert "no job of this process runs" not in queue.log


def status(job_id: str) -> str:
    row = node_queue.get_ingest_job(job_id)
    assert row is not None
    return row["status"]
