"""Start a gpu worker as a process, and read its GPU memory from nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from queue_workflows import db, node_queue, run_store
from queue_workflows.telemetry import gpu_overview
from tests.support import constants, wait

ROOT = Path(__file__).parents[2]
HOST = "gpu-check"
PATIENCE_S = 120.0
Row = dict[str, Any]


class Bench:
    """The worker and what can be seen of it from outside. The process's DSN names the database.

    `env`: knobs of the worker. `patience_s`: for what should come at once.
    """

    def __init__(self, env: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
        given = {**os.environ, **env, "QUEUE_WORKFLOWS_HOST_LABEL": HOST}
        self._env = constants.for_children(given)
        self.patience_s = patience_s
        self._reader = gpu_overview.Reader(None)
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGTERM)
            try:
                self._worker.wait(20)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()

    def start(self) -> None:
        """Start the worker, and wait until it has reported."""
        command = [sys.executable, "-m", "queue_workflows.claim_worker", "--queue", "gpu"]
        self._worker = subprocess.Popen(
            [*command, "--app", "tests.gpu.app:setup", "--log-level", "warning"],
            cwd=ROOT,
            env=constants.for_children(self._env),
            start_new_session=True,
        )
        pid = self._worker.pid
        self.until(lambda: self._rows("SELECT 1 FROM workers WHERE pid = %s", pid), "a worker")

    def exit_code(self) -> int:
        """Return the exit code of the worker."""
        assert self._worker is not None
        return self._worker.wait(self.patience_s)

    def used_mb(self) -> int:
        """Return the memory in use on all GPUs, by any process."""
        found = self._reader.read()
        if not found:
            raise AssertionError("nvidia-smi has no reading")
        return sum(card.vram_used_mb for card in found)

    def submit(self, node: str, model: str | None = None) -> str:
        """Queue a job; its id."""
        run = run_store.insert_run(workflow_name="gpu-check", status="running")
        return node_queue.enqueue_node_job(
            run_id=run["id"], node_id=node, node_module=node, queue="gpu", required_model=model
        )

    def finished(self, job_id: str, *, timeout_s: float | None = None) -> Row:
        """Return the job's row once it is completed; raise AssertionError if it fails."""

        def over() -> Row | None:
            job = node_queue.get_node_job(job_id)
            assert job is not None
            assert job["status"] not in ("failed", "cancelled"), job["error"]
            return job if job["status"] == "completed" else None

        return self.until(over, f"job {job_id}", timeout_s)

    def events(self, job_id: str) -> list[str]:
        """Return the types of the job's events, in order."""
        rows = self._rows(
            "SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id", job_id
        )
        return [row["event_type"] for row in rows]

    def loads(self) -> int:
        """Return the number of loads of all jobs."""
        (row,) = self._rows(
            "SELECT count(*) AS n FROM workflow_node_events WHERE event_type = 'model_load_done'"
        )
        return row["n"]

    def until(self, true: Any, what: str, timeout_s: float | None = None) -> Any:
        """Return its first true value; raise AssertionError that names `what`."""
        limit_s = self.patience_s if timeout_s is None else timeout_s
        try:
            return wait.until(true, timeout_s=limit_s, every_s=0.05)
        except AssertionError as error:
            if not str(error).startswith("not true within"):
                raise
            raise AssertionError(f"{what}: not within {limit_s:g} s") from None

    def _rows(self, statement: Any, *values: Any) -> list[Row]:
        with db.transaction() as conn:
            return conn.execute(statement, values).fetchall()
