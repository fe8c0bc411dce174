"""Submit rare and large load: joins of 300 nodes, retried runs, payloads near the limit."""

from __future__ import annotations

import random
import uuid
from contextlib import suppress

from queue_workflows import config, db, errors, jobs, run_store, runs
from tests.soak import acknowledgements, tasks, workflows

CROWD_GAP_S, RETRY_GAP_S, LARGE_GAP_S = 60.0, 8.0, 15.0
_FAILED = """
SELECT id FROM workflow_runs WHERE id = ANY (%s) AND status = 'failed' ORDER BY id LIMIT 20
"""


class RareLoad:
    """Each method does one of its kind and notes what was acknowledged."""

    def __init__(self, seed: int, known: acknowledgements.Acknowledgements) -> None:
        self._rng = random.Random(seed * 4409 + 3)
        self._books = known

    def _id(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128)))

    def crowd(self) -> None:
        """Submit a run whose last node waits for 300 others."""
        run_id = self._id()
        run_store.insert_run(run_id=run_id, workflow_name=workflows.CROWD)
        self._books.runs[run_id] = workflows.CROWD

    def retry(self) -> None:
        """Run a failed run again: it is poison, and fails again."""
        poison = [run for run, name in [*self._books.runs.items()] if name in workflows.POISON]
        with db.connection() as conn:
            failed = conn.execute(_FAILED, (poison,)).fetchall()
        if not failed:
            return
        run_id = self._rng.choice(failed)["id"]
        # Counted before it is tried: of an answer that is lost nobody knows what it was.
        self._books.retried[run_id] += 1
        with suppress(errors.InvalidConfig):
            runs.retry(run_id)

    def large(self) -> None:
        """Queue a job with args just below the limit, and a run with such a context."""
        text = "x" * (config.MAX_PAYLOAD_KB.read() * 1024 - 200)
        job_id = jobs.enqueue(
            task_name="note", queue=tasks.NOTES, reason="load", args={"padding": text}
        )
        self._books.jobs[job_id] = "note"
        run_id = self._id()
        run_store.insert_run(run_id=run_id, workflow_name="join", context={"padding": text})
        self._books.runs[run_id] = "join"
