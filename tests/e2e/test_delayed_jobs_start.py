"""Idle workers wake when a delayed job is due: none of these polls within the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db
from tests.support import constants, factories, step_app
from tests.support.commands import Commands
from tests.support.transitions import TABLES, Kind
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("step_tasks")
APP = "tests.support.step_app:setup"
POOL = ("--workers", '[{"queue": "work", "concurrency": 4}]')
SHAPES = pytest.mark.parametrize(
    ("kind", "queue", "shape"),
    [
        pytest.param("ingest", "work", ("--inline",), id="ingest, inline"),
        pytest.param("ingest", "work", ("--slots", "4"), id="ingest, executors"),
        pytest.param("ingest", "work", ("--slots", "4", "--async"), id="ingest, async executor"),
        pytest.param("ingest", "work", ("--batch", "3"), id="ingest, batches"),
        pytest.param("ingest", "work", POOL, id="ingest, pool"),
        pytest.param("node", "cpu", ("--inline",), id="nodes, inline"),
        pytest.param("node", "gpu", ("--inline",), id="gpu nodes, inline"),
        pytest.param("node", "cpu", ("--slots", "4"), id="nodes, executors"),
        pytest.param("node", "cpu", ("--slots", "2", "--batch", "3"), id="nodes, batches"),
    ],
)
NEVER = {"QUEUE_WORKFLOWS_CLAIM_POLL_S": "600"}


def start(cli: Commands, queue: str, shape: tuple[str, ...], **env: str) -> None:
    of = () if "--workers" in shape else ("--queue", queue)
    cli.start("queue-claim-worker", *of, "--app", APP, *shape, **NEVER, **env)
    with db.connect() as conn:
        until(lambda: factories.one(conn, "SELECT count(*) FROM workers WHERE state = 'idle'"))


def queued(kind: Kind, queue: str, folder: Path, seconds: float, **columns: Any) -> str:
    folder.mkdir()
    args = {"folder": str(folder), "seconds": seconds}
    with db.connect() as conn:
        if kind == "ingest":
            row = factories.ingest(conn, task_name="naps", queue=queue, args=args, **columns)
        else:
            row = factories.node(conn, node_module="node_naps", queue=queue, inputs=args, **columns)
    return row["id"]


def completes(kind: Kind, job_id: str) -> None:
    query = f"SELECT status FROM {TABLES[kind]} WHERE id = %s"
    with db.connect() as conn:
        until(lambda: factories.one(conn, query, job_id) == "completed")


@SHAPES
@pytest.mark.parametrize("keep_s", ["30", "0"], ids=["kept", "not kept"])
def test_a_sleep_ends_in_time(
    cli: Commands, tmp_path: Path, kind: Kind, queue: str, shape: tuple[str, ...],
    keep_s: str,
) -> None:  # fmt: skip
    kept = constants.env({"claim.job_steps.RESUME_ON_HOST_S": float(keep_s)})
    start(cli, queue, shape, **kept)
    ids = [queued(kind, queue, tmp_path / str(n), seconds) for n, seconds in ((1, 0.4), (2, 0.9))]
    for job_id in ids:
        completes(kind, job_id)
    for folder in ("1", "2"):
        assert step_app.lines(tmp_path / folder) == [("before", 1), ("after", 2)]


@SHAPES
def test_a_delayed_job_starts_in_time(
    cli: Commands, tmp_path: Path, kind: Kind, queue: str, shape: tuple[str, ...]
) -> None:
    with db.connect() as conn:
        due = factories.one(conn, "SELECT now() + interval '3 seconds'")
    job_id = queued(kind, queue, tmp_path / "one", 0, available_at=due)
    start(cli, queue, shape)
    completes(kind, job_id)
