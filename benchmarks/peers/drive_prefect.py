"""Drive Prefect in its own environment: `drive_prefect.py ROLE COUNT ANSWER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SLOTS = 4
os.environ |= {
    # Its server keeps SQLite there: PostgreSQL would need pg_trgm, which a throw-away server lacks.
    "PREFECT_HOME": sys.argv[3] + ".home",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
}

from prefect import flow, task  # noqa: E402  reads the settings above
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402


@task(persist_result=True)
def noop(number: int) -> int:
    return number


@flow(task_runner=ThreadPoolTaskRunner(max_workers=SLOTS))
def fan_out(count: int) -> int:
    """Map a task over the items and wait for all."""
    return sum(noop.map(range(count)).result())


def main() -> int:
    role, count, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if role != "map":
        raise SystemExit(f"no role {role}")
    fan_out(5)
    begun = time.perf_counter()
    fan_out(count)
    found = {"rate": count / (time.perf_counter() - begun)}
    Path(answer).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
