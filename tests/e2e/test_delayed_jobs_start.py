"""Idle workers wake when a delayed job is due: none of these polls within the test."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows.engine import job_tables
from tests.support import commands, factories, invariants, step_app
from tests.support.commands import Commands
from tests.support.wait import until

APP = "tests.support.step_app:setup"
NODES, INGEST = job_tables.NODE_JOBS, job_tables.INGEST_JOBS
POOL = ("--workers", '[{"queue": "work", "concurrency": 4}]')
SHAPES = pytest.mark.parametrize(
    ("table", "queue", "shape"),
    [
        pytest.param(INGEST, "work", ("--inline",), id="ingest, inline"),
        pytest.param(INGEST, "work", ("--slots", "4"), id="ingest, executors"),
        pytest.param(INGEST, "work", ("--slots", "4", "--async"), id="ingest, async executor"),
        pytest.param(INGEST, "work", ("--batch", "3"), id="ingest, batches"),
        pytest.param(INGEST, "work", POOL, id="ingest, pool"),
        pytest.param(NODES, "cpu", ("--inline",), id="nodes, inline"),
        pytest.param(NODES, "gpu", ("--inline",), id="gpu nodes, inline"),
        pytest.param(NODES, "cpu", ("--slots", "4"), id="nodes, executors"),
        pytest.param(NODES, "cpu", ("--slots", "2", "--batch", "3"), id="nodes, batches"),
    ],
)
NEVER = {"QUEUE_WORKFLOWS_CLAIM_POLL_S": "600"}


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    step_app.setup()
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield made
    with engine.connect() as conn:
        assert invariants.broken(conn, slack_s=30) == []


def start(cli: Commands, queue: str, shape: tuple[str, ...], **env: str) -> None:
    of = () if "--workers" in shape else ("--queue", queue)
    cli.start("queue-claim-worker", *of, "--app", APP, *shape, **NEVER, **env)
    with engine.connect() as conn:
        until(lambda: factories.one(conn, "SELECT count(*) FROM workers WHERE state = 'idle'"))


def queued(
    table: job_tables.JobTable, queue: str, folder: Path, seconds: float, **columns: Any
) -> str:
    folder.mkdir()
    args = {"folder": str(folder), "seconds": seconds}
    with engine.connect() as conn:
        if table is INGEST:
            row = factories.ingest(conn, task_name="naps", queue=queue, args=args, **columns)
        else:
            row = factories.node(conn, node_module="node_naps", queue=queue, inputs=args, **columns)
    return row["id"]


def completes(table: job_tables.JobTable, job_id: str) -> None:
    query = f"SELECT status FROM {table.name} WHERE id = %s"
    with engine.connect() as conn:
        until(lambda: factories.one(conn, query, job_id) == "completed")


@SHAPES
@pytest.mark.parametrize("keep_s", ["30", "0"], ids=["kept", "not kept"])
def test_a_sleep_ends_in_time(
    cli: Commands, tmp_path: Path, table: job_tables.JobTable, queue: str, shape: tuple[str, ...],
    keep_s: str,
) -> None:  # fmt: skip
    start(cli, queue, shape, QUEUE_WORKFLOWS_RESUME_ON_HOST_S=keep_s)
    ids = [queued(table, queue, tmp_path / str(n), seconds) for n, seconds in ((1, 0.4), (2, 0.9))]
    for job_id in ids:
        completes(table, job_id)
    for folder in ("1", "2"):
        assert step_app.lines(tmp_path / folder) == [("before", 1), ("after", 2)]


@SHAPES
def test_a_delayed_job_starts_in_time(
    cli: Commands, tmp_path: Path, table: job_tables.JobTable, queue: str, shape: tuple[str, ...]
) -> None:
    with engine.connect() as conn:
        due = factories.one(conn, "SELECT now() + interval '3 seconds'")
    job_id = queued(table, queue, tmp_path / "one", 0, available_at=due)
    start(cli, queue, shape)
    completes(table, job_id)
