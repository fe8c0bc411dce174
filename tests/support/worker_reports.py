"""Write what a worker reports about itself, and read what others see of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.worker import leases
from tests.support import transitions


def report(
    conn: db.Connection,
    who: transitions.Claimant,
    detail: dict[str, Any] | None = None,
    **columns: Any,
) -> None:
    """Write the row of a worker: what its claims depend on, and by default that it is idle.

    `detail`: more of what it reports, beside its claims.
    """
    values = {
        "worker_id": who.worker_id, "host_label": who.host, "queue": who.queue, "pid": 7,
        "state": "idle", "job_ids": [],
        "detail": json.dumps({"claim": leases.claim_detail(who)} | (detail or {})), "obey": True,
        "concurrency": 1, "current_model": who.model, "known_models": who.models or [],
        "vram_total_mb": None,
    }  # fmt: skip
    statements.workers.report(conn, **(values | columns))


def fill_memory(
    conn: db.Connection, memories: Sequence[str], but: Sequence[str], stale_s: float
) -> bool:
    """Return whether jobs of a live worker other than `but` fill one of these memories."""
    return (
        statements.workers.fill_memory(conn, memory=[*memories], but=[*but], stale_s=stale_s)
        is not None
    )


def learn_load(conn: db.Connection, host: str, model: str, seconds: float) -> None:
    """Note how long a load of a model took."""
    statements.models.learn_load(conn, host=host, model=model, seconds=seconds)


def publish_sizes(conn: db.Connection, host: str, sizes: dict[str, float]) -> None:
    """Write the GPU memory in GB that models need, as a host registers them; 0: unknown."""
    statements.models.publish_sizes(
        conn, host=host, models=[*sizes], sizes=[size or None for size in sizes.values()]
    )
