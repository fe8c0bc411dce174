"""Store streamed parts that a handler of this process would only send with its next call."""

from __future__ import annotations

import functools
import math

from queue_workflows import db
from queue_workflows.engine import job_steps, job_tables
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import process_jobs

EVERY_S = 0.1
"""Seconds between two checks of the unsent parts."""
AGAIN_S = 1.0
"""Seconds without a try to store them after the database was away."""


class UnsentParts:
    """A task of the lease keeper, on its connection."""

    def __init__(
        self, jobs: process_jobs.ProcessJobs, dedicated: db.DedicatedConnection, now_fn: NowFn
    ) -> None:
        self._jobs = jobs
        self._dedicated = dedicated
        self._now = now_fn
        self._may_store_at = 0.0

    def pause_s(self) -> float:
        """Return how long the task may wait: for ever while there are no unsent parts."""
        return EVERY_S if any(work.has_unsent_parts for work in self._jobs.running) else math.inf

    def store(self) -> None:
        """Store the parts; raises the errors of the database."""
        if self._now() < self._may_store_at:
            return
        for work in self._jobs.running:
            try:
                work.store_parts(functools.partial(self._store_batch, work.lease))
            except (db.OperationalError, db.InterfaceError):
                self._may_store_at = self._now() + AGAIN_S
                raise

    def _store_batch(self, lease: job_tables.Lease, request: JsonDict) -> None:
        with self._dedicated.using() as conn:
            job_steps.answer(conn, lease, request)
