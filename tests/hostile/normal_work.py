"""Submit normal runs and jobs, which must end in time whatever the hostile rows are."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from queue_workflows import db, errors, run_store
from queue_workflows import jobs as jobs_api
from queue_workflows import runs as runs_api
from tests.hostile import app, folders
from tests.support import wait

EVERY_S = 0.1
_RUNS = "SELECT id, status, error FROM workflow_runs WHERE id = ANY (%s) ORDER BY id"
_JOBS = """
SELECT id, queue, lock_key, partition_key, status::text, error, attempts, crash_count
  FROM ingest_jobs WHERE id = ANY (%s) ORDER BY id
"""
_WAITING = """
SELECT run_id, node_id FROM workflow_node_jobs WHERE status = 'awaiting_input' AND run_id = ANY (%s)
"""
_FIRED = """
SELECT count(*) AS n FROM schedule_fires f JOIN ingest_jobs j ON j.id = f.job_id
 WHERE f.name = 'every' AND f.created_at > %s AND j.status = 'completed'
"""


class NormalWork:
    """Runs with a question that a bot answers, jobs of every kind of worker, and a schedule."""

    def __init__(self) -> None:
        with db.connection() as conn:
            row = conn.execute("SELECT clock_timestamp() AS t").fetchone()
            assert row is not None
            self._since = row["t"]
        self._runs = [
            run_store.insert_run(workflow_name="normal", out_dir=f"{folders.ROOT}/{n}")["id"]
            for n in range(2)
        ]
        self._jobs = [
            jobs_api.enqueue(task_name=task, queue=queue, args={}, **more)
            for queue, task, more in (
                (app.SOLO, "note", {}),
                (app.SOLO, "note", {"lock_key": app.LOCK_KEY}),
                (app.NOTES, "note", {}),
                (app.NOTES, "note", {"lock_key": app.LOCK_KEY}),
                (app.FEEDS, "note", {}),
                (app.FEEDS, "fetch", {}),
                (app.CALLS, "fetch", {"partition_key": app.PARTITION}),
                (app.CALLS, "note", {"partition_key": app.PARTITION}),
            )
        ]

    def _left(self, *, fires: bool) -> list[str]:
        """Return the work that has not ended well yet."""
        self._answer()
        with db.connection() as conn:
            runs = conn.execute(_RUNS, (self._runs,)).fetchall()
            jobs = conn.execute(_JOBS, (self._jobs,)).fetchall()
            fired = conn.execute(_FIRED, (self._since,)).fetchone()
        found = [
            f"normal run is {row['status']}: {row['error']}"
            for row in runs
            if row["status"] != "completed"
        ]
        found += [
            f"normal job of queue {row['queue']} is {row['status']}, attempts {row['attempts']},"
            f" crashes {row['crash_count']}: {row['error']}"
            for row in jobs
            if (row["status"], row["attempts"], row["crash_count"]) != ("completed", 0, 0)
        ]
        if fires and not (fired and fired["n"]):
            found.append("no schedule entry has fired, or no job of one has ended")
        missing = len(self._runs) + len(self._jobs) - len(runs) - len(jobs)
        return found + [f"{missing} normal rows are gone"] * bool(missing)

    def _answer(self) -> None:
        with db.connection() as conn:
            waiting = conn.execute(_WAITING, (self._runs,)).fetchall()
        for row in waiting:
            with suppress(errors.InputRefused):
                runs_api.answer(row["run_id"], row["node_id"], "l")

    def wait(self, bound_s: float, given_up: Callable[[], bool]) -> tuple[list[str], float]:
        """Return what has not ended within the bound, and its time; end early on `given_up`."""
        began = time.monotonic()
        left: list[str] = []

        def ended() -> bool:
            left[:] = self._left(fires=True)
            return not left or given_up()

        with suppress(AssertionError):
            wait.until(ended, timeout_s=bound_s, every_s=EVERY_S)
        return left, time.monotonic() - began
