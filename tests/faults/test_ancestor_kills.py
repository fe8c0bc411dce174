"""A handler that kills its launcher or its worker is charged, and the jobs beside it are not lost.

Its third crash makes it poison. A crash is counted for every job of a worker that dies, as nobody
sees which handler was at fault; but a job whose next crash is its last runs alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, jobs
from tests.support import constants, hanging_app
from tests.support.commands import Commands
from tests.support.wait import until
from tests.support.worker_views import row as row_of

SERVE = ("queue-claim-worker", "--app", "tests.support.hanging_app:setup", "--queue", "work")
WAYS = {
    "supervised": (*SERVE, "--supervise"),
    "slots": (*SERVE, "--slots", "4", "--supervise"),
    "batch": (*SERVE, "--slots", "2", "--batch", "8", "--supervise"),
    "async": (*SERVE, "--slots", "4", "--async", "--supervise"),
}
QUICK = {
    **constants.env({"runtime.supervisor.BACKOFF_MAX_S": 0.2}),
    "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0.1",
    "QUEUE_WORKFLOWS_CLAIM_POLL_S": "0.2",
}
LAUNCHER, WORKER = 1, 2
GOOD = 20


def deaths(job_id: str) -> list[dict[str, Any]]:
    query = "SELECT * FROM ingest_job_events WHERE job_id = %s AND event_type = 'death' ORDER BY id"
    with db.connect() as conn:
        return conn.execute(query, (job_id,)).fetchall()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("way", "levels"),
    [
        pytest.param("supervised", LAUNCHER, id="supervised, launcher"),
        pytest.param("slots", LAUNCHER, id="slots, launcher"),
        pytest.param("slots", WORKER, id="slots, worker"),
        pytest.param("batch", WORKER, id="batch, worker"),
        pytest.param("async", LAUNCHER, id="async, launcher"),
    ],
)
def test_a_killer_among_good_jobs_is_poison_after_three_crashes_and_all_others_complete(
    cli: Commands, db: object, tmp_path: Path, way: str, levels: int
) -> None:
    hanging_app.setup()
    args = {"folder": str(tmp_path), "seconds": 0.2}
    good = [jobs.enqueue(task_name="lasts", queue="work", args=args) for _ in range(GOOD // 2)]
    killer = jobs.enqueue(task_name="kills_ancestor", queue="work", args=args | {"levels": levels})
    good += [jobs.enqueue(task_name="lasts", queue="work", args=args) for _ in range(GOOD // 2)]
    worker = cli.start(*WAYS[way], **QUICK)
    until(lambda: row_of(killer)["status"] == "failed", timeout_s=60)
    until(lambda: {row_of(job)["status"] for job in good} == {"completed"}, timeout_s=60)
    row = row_of(killer)
    assert (row["crash_count"], row["claim_no"]) == (3, 3), worker.err
    assert row["error"].startswith("poison: took down 3 workers"), row["error"]
    assert "SIGKILL" in row["error"]
    assert len((tmp_path / "kills").read_text().splitlines()) == 3
    assert len(deaths(killer)) == 3
    assert max(row_of(job)["crash_count"] for job in good) <= 2
