"""Send the heartbeat of a worker process: one row of `workers` for each of its queues."""

from __future__ import annotations

import logging
import os

from queue_workflows import db
from queue_workflows.dag import payload
from queue_workflows.engine import workers
from queue_workflows.types import JsonDict
from queue_workflows.worker import gpu_runtime, memory_throttle, process_jobs, slot

_log = logging.getLogger("queue_workflows.claim_worker")


class Heartbeat:
    """What the rows of a process's workers show, sent on the lease keeper's connection."""

    def __init__(
        self,
        jobs: process_jobs.ProcessJobs,
        gpu: gpu_runtime.GpuRuntime,
        memory: memory_throttle.MemoryThrottle,
        dedicated: db.DedicatedConnection,
    ) -> None:
        self._jobs = jobs
        self._gpu = gpu
        self._memory = memory
        self._dedicated = dedicated
        self.locked = False
        """Whether a session of this worker holds its advisory lock of a live worker."""
        self._is_registered = False

    def send(self) -> None:
        """Write the rows, and the sizes of models that have changed."""
        columns, is_measured = self._gpu.columns(), self._gpu.is_measured
        with self._dedicated.using() as conn:
            for each in self._jobs.slots:
                workers.report(conn, self._report(each) | columns)
            self._gpu.publish_sizes(conn, columns["known_models"])
        if not self._is_registered:
            self._is_registered = True
            for each in self._jobs.slots:
                # Not before the row: `queue-workflows run` starts a worker where it finds none.
                _log.info("worker %s works on %s", each.who().worker_id, db.describe())
        if is_measured:
            self._gpu.published.set()

    def _report(self, own: slot.Slot) -> JsonDict:
        who, works = own.who(), self._jobs.running_in(own)
        detail = {
            "lease_s": who.lease_s,
            "lock": self.locked,
            "claim": workers.claim_detail(who),
            **self._gpu.detail(),
            **self._memory.detail(),
        }
        return {
            "worker_id": who.worker_id,
            "host_label": who.host,
            "queue": who.queue,
            "pid": os.getpid(),
            "state": "busy" if works else "throttled" if self._memory.active else "idle",
            "job_ids": [work.job["id"] for work in works],
            "detail": payload.encode(detail, "detail"),
            "obey": who.obey,
            "concurrency": own.concurrency,
        }
