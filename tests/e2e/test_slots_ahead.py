"""A worker with slots claims short jobs ahead of its free executors; none waits for a long one."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows import jobs, node_queue
from tests.support import commands, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until

Row = dict[str, Any]
SHORT = 60


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts workers on the test database; none outlives the test."""
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        slot_app.setup()
        yield made


def worker(cli: Commands, slots: int) -> Command:
    return cli.start(
        "queue-claim-worker", "--queue", slot_app.QUEUE, "--slots", str(slots),
        "--app", "tests.support.slot_app:setup",
    )  # fmt: skip


def enqueued(task: str, args: Row) -> str:
    return jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=args)


def row(job_id: str) -> Row:
    found = node_queue.get_ingest_job(job_id)
    assert found is not None
    return found


def ended(ids: list[str]) -> bool:
    return all(row(each)["status"] == "completed" for each in ids)


@pytest.fixture
def blocked(cli: Commands, tmp_path: Path) -> tuple[Command, list[Path], list[str]]:
    """A worker whose executors all run long handlers, which short ones preceded and follow."""
    first = [enqueued("quick", {"number": number}) for number in range(SHORT)]
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
        enqueued("waits", {"folder": str(folder)})
    behind = [enqueued("quick", {"number": number}) for number in range(3)]
    running = worker(cli, 2)
    until(lambda: all(slot_app.starts_of(each) for each in folders))
    assert ended(first[:-4])
    return running, folders, behind


def test_a_job_that_waits_behind_long_handlers_is_left_to_other_workers(
    cli: Commands, blocked: tuple[Command, list[Path], list[str]]
) -> None:
    running, folders, behind = blocked
    other = worker(cli, 1)
    until(lambda: ended(behind))
    assert [(row(each)["attempts"], row(each)["crash_count"]) for each in behind] == [(0, 0)] * 3
    slot_app.let_go(*folders)
    for each in (running, other):
        each.send(signal.SIGTERM)
        assert each.wait() == 0, each.err


def test_a_worker_that_stops_gives_back_at_once_what_waits(
    blocked: tuple[Command, list[Path], list[str]],
) -> None:
    running, folders, behind = blocked
    running.send(signal.SIGTERM)
    until(lambda: all(row(each)["status"] == "queued" for each in behind))
    slot_app.let_go(*folders)
    assert running.wait() == 0, running.err
    rows = [row(each) for each in behind]
    assert [(each["status"], each["attempts"], each["crash_count"]) for each in rows] == [
        ("queued", 0, 0)
    ] * 3


def test_the_results_of_short_jobs_share_statements(cli: Commands) -> None:
    ids = [enqueued("quick", {"number": number}) for number in range(400)]
    running = worker(cli, 4)
    until(lambda: ended(ids))
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err
    with engine.connect() as conn:
        found = conn.execute("SELECT count(DISTINCT finished_at) AS n FROM ingest_jobs").fetchone()
    assert found is not None
    assert found["n"] < 300
