"""Workers of two hosts: a job that has waited goes on where it was, and elsewhere if it must."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, events, jobs, runs
from tests.support import constants, factories, step_app
from tests.support.commands import Command, Commands
from tests.support.transitions import EVENTS, TABLES, Kind
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("step_tasks")
APP = "tests.support.step_app:setup"
POOL = ("--workers", '[{"queue": "work", "concurrency": 4}]')
SHAPES = pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("ingest", ("--inline",), id="ingest, inline"),
        pytest.param("ingest", ("--slots", "2"), id="ingest, executors"),
        pytest.param("ingest", ("--slots", "4", "--async"), id="ingest, async executor"),
        pytest.param("ingest", ("--batch", "3"), id="ingest, batches"),
        pytest.param("ingest", POOL, id="ingest, pool"),
        pytest.param("node", ("--inline",), id="nodes, inline"),
        pytest.param("node", ("--slots", "2"), id="nodes, executors"),
        pytest.param("node", ("--slots", "2", "--batch", "3"), id="nodes, batches"),
    ],
)


def worker(cli: Commands, host: str, kind: Kind, shape: tuple[str, ...], keep_s: float) -> Command:
    queue = () if "--workers" in shape else ("--queue", queue_of(kind))
    env: dict[str, Any] = {
        "QUEUE_WORKFLOWS_HOST_LABEL": host,
        **constants.env({"claim.job_steps.RESUME_ON_HOST_S": keep_s}),
    }  # fmt: skip
    made = cli.start("queue-claim-worker", *queue, "--app", APP, *shape, **env)
    until(lambda: host in live_hosts())
    return made


def stop_between_transactions(command: Command) -> None:
    """Stop a worker where it holds no lock: else a cancel waits, and an event skips its job."""

    def stopped() -> bool:
        command.send(signal.SIGSTOP)
        with db.connect() as conn:
            if not factories.one(conn, OPEN):
                return True
        command.send(signal.SIGCONT)
        return False

    until(stopped)


OPEN = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND backend_type = 'client backend' AND state <> 'idle'
"""


def live_hosts() -> list[str]:
    with db.connect() as conn:
        return factories.column(
            conn, "SELECT host_label FROM workers WHERE state NOT IN ('stopped', 'dead')"
        )


def queue_of(kind: Kind) -> str:
    return "cpu" if kind == "node" else step_app.QUEUE


def queued(kind: Kind, folder: Path) -> str:
    folder.mkdir()
    args = {"folder": str(folder), "key": folder.name}
    if kind == "ingest":
        return jobs.enqueue("waits", queue=step_app.QUEUE, args=args)
    with db.connect() as conn:
        return factories.node(conn, node_module="node_waits", inputs=args)["id"]


def row(kind: Kind, job_id: str) -> dict[str, Any]:
    with db.connect() as conn:
        query = f"SELECT * FROM {TABLES[kind]} WHERE id = %s"
        found = conn.execute(query.encode(), (job_id,)).fetchone()
    assert found is not None
    return found


def hosts(kind: Kind, job_id: str) -> list[str]:
    """Return the hosts of its claims, the first one first."""
    with db.connect() as conn:
        query = (
            f"SELECT host_label FROM {EVENTS[kind]} WHERE job_id = %s AND event_type = 'claimed'"
            " ORDER BY id"
        )
        return factories.column(conn, query, job_id)


def waits(kind: Kind, job_id: str) -> None:
    until(lambda: row(kind, job_id)["blocked_reason"] == "not_due")


def is_done(kind: Kind, job_id: str) -> bool:
    return row(kind, job_id)["status"] == "completed"


@SHAPES
def test_a_job_goes_on_where_it_was_although_another_host_is_idle(
    cli: Commands, tmp_path: Path, kind: Kind, shape: tuple[str, ...]
) -> None:
    first = worker(cli, "a", kind, shape, 600)
    job_id = queued(kind, tmp_path / "one")
    waits(kind, job_id)
    worker(cli, "b", kind, shape, 600)
    stop_between_transactions(first)
    events.send("go", key="one", value=1)
    # Before the wait: one that is sent while a wait begins may be left to the orchestrator's sweep.
    events.send("go", key="two", value=2)
    other = queued(kind, tmp_path / "two")
    until(lambda: is_done(kind, other))  # the other host has claimed after the event
    assert row(kind, job_id)["status"] == "queued"
    first.send(signal.SIGCONT)
    until(lambda: is_done(kind, job_id))
    assert hosts(kind, job_id) == ["a", "a"]
    assert set(hosts(kind, other)) == {"b"}
    assert step_app.lines(tmp_path / "one") == [("before", 1), ("after", 2)]


@SHAPES
def test_a_job_goes_on_elsewhere_after_the_time_if_its_host_is_gone(
    cli: Commands, tmp_path: Path, kind: Kind, shape: tuple[str, ...]
) -> None:
    first = worker(cli, "a", kind, shape, 2)
    job_id = queued(kind, tmp_path / "one")
    waits(kind, job_id)
    first.send(signal.SIGTERM)
    first.wait()
    worker(cli, "b", kind, shape, 2)
    events.send("go", key="one", value=1)
    until(lambda: is_done(kind, job_id))
    assert hosts(kind, job_id) == ["a", "b"]
    with db.connect() as conn:
        query = (
            "SELECT extract(epoch FROM max(c.created_at) - max(e.created_at))::float8"
            f" FROM {EVENTS[kind]} c, events e WHERE c.job_id = %s AND c.event_type = 'claimed'"
        )
        assert factories.one(conn, query, job_id) >= 2


@pytest.mark.parametrize("kind", ["ingest", "node"], ids=["ingest", "nodes"])
def test_a_job_that_is_cancelled_while_it_is_kept_does_not_go_on(
    cli: Commands, tmp_path: Path, kind: Kind
) -> None:
    first = worker(cli, "a", kind, (), 600)
    job_id = queued(kind, tmp_path / "one")
    waits(kind, job_id)
    stop_between_transactions(first)
    events.send("go", key="one", value=1)
    if kind == "ingest":
        jobs.cancel(job_id)
    else:
        runs.cancel(row(kind, job_id)["run_id"])
    assert row(kind, job_id)["status"] == "cancelled"
    first.send(signal.SIGCONT)
    # Before the wait: one that is sent while a wait begins may be left to the orchestrator's sweep.
    events.send("go", key="two", value=2)
    other = queued(kind, tmp_path / "two")
    until(lambda: is_done(kind, other))
    assert step_app.lines(tmp_path / "one") == [("before", 1)]
