"""Write the row in `workers` of a process whose in-process queue runs ingest jobs."""

from __future__ import annotations

import os
from typing import Any

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.engine import claims as engine_claims
from queue_workflows.engine import workers
from queue_workflows.local_queue import ingest_claims, plan
from queue_workflows.telemetry import pressure


class Heartbeat:
    """The row of this process in `workers`; for one thread."""

    def __init__(
        self,
        who: engine_claims.Claimant,
        held: ingest_claims.Claims,
        owner: plan.Owner,
        *,
        limit: int,
    ) -> None:
        self._who = who
        self._held = held
        self._owner = owner
        self._limit = limit
        self._memory = pressure.Memory()
        self.locked = False
        """Whether a session holds the advisory lock that proves this process to live."""
        self.others_fill_memory = False
        """Whether a job of another worker filled memory of this process that is nearly full."""

    def beat(self, conn: db.Connection) -> None:
        """Write what this process does, and note whether others fill the same memory."""
        held, who, full = self._held.all(), self._who, self._owner.throttled_by
        reading = self._memory.read()
        detail = {
            "lease_s": who.lease_s,
            "lock": self.locked,
            "claim": workers.claim_detail(who),
            "throttle": full,
            "memory": pressure.ids(self._memory.within),
        }
        row: dict[str, Any] = {
            "worker_id": who.worker_id,
            "host_label": who.host,
            "queue": who.queue,
            "pid": os.getpid(),
            "state": "busy" if held else "throttled" if full else "idle",
            "job_ids": [each.job_id for each in held],
            "detail": payload.encode(detail, "detail"),
            "obey": who.obey,
            "concurrency": self._limit,
            "current_model": None,
            "known_models": [],
            "vram_total_mb": None,
        }
        workers.report(conn, row)
        self.others_fill_memory = self._is_filled_by_others(conn, reading)

    def _is_filled_by_others(self, conn: db.Connection, reading: pressure.Reading) -> bool:
        if not (full := pressure.nearly_full(reading)):
            return False
        but, stale_s = [self._who.worker_id], config.STALE_WORKER_AFTER_S.read()
        return workers.fill_memory(conn, pressure.ids(full), but=but, stale_s=stale_s)
