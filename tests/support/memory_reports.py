"""Report workers that fill the memory of this machine."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from queue_workflows.telemetry import pressure
from tests.support import factories


def other_worker(conn: Any) -> None:
    """Insert a worker `other`, of this machine, that has a job."""
    memory = pressure.Memory()
    memory.read()
    factories.insert(
        conn, "workers", worker_id="other", host_label="box", queue="load", pid=7, state="busy",
        job_ids=["j"], detail=Jsonb({"memory": pressure.ids(memory.within)}),
    )  # fmt: skip
