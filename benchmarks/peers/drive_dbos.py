"""Drive DBOS in its own environment: `drive_dbos.py ROLE COUNT ANSWER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from dbos import DBOS

DSN = os.environ["QUEUE_WORKFLOWS_DB_URL"]
SLOTS = 4
POLL_S = 0.01
"""How often a full queue looks for the next: its default of 1 s would be what is measured."""
starts: list[int] = []


@DBOS.workflow()
def noop(number: int) -> int:
    starts.append(time.monotonic_ns())
    return number


@DBOS.workflow()
def fan_out(count: int) -> int:
    """Enqueue a workflow for each item and wait for all."""
    handles = [DBOS.enqueue_workflow("items", noop, number) for number in range(count)]
    return sum(handle.get_result() for handle in handles)


def drain(count: int) -> dict[str, float]:
    """Return the rate from the first start to the last, `SLOTS` at once."""
    for handle in [DBOS.enqueue_workflow("slots", noop, number) for number in range(count)]:
        handle.get_result()
    return {"rate": (count - 1) / (max(starts) - min(starts)) * 1e9}


def fan(count: int) -> dict[str, float]:
    """Return the items a second from the start of the workflow to its end."""
    begun = time.perf_counter()
    DBOS.start_workflow(fan_out, count).get_result()
    return {"rate": count / (time.perf_counter() - begun)}


def main() -> int:
    role, count, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # Its dialect of SQLAlchemy has to be named.
    url = DSN.replace("postgresql://", "postgresql+psycopg://", 1)
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "WARNING"})
    DBOS.launch()
    DBOS.register_queue("slots", worker_concurrency=SLOTS, polling_interval_sec=POLL_S)
    DBOS.register_queue("items", polling_interval_sec=POLL_S)
    try:
        {"slots": drain, "map": fan}[role](20)
        starts.clear()
        found = {"slots": drain, "map": fan}[role](count)
    finally:
        DBOS.destroy()
    Path(answer).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
