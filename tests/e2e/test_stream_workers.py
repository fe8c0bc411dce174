"""Handlers in every kind of worker stream, and readers get each attempt's parts in order."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, jobs, streams
from tests.support import constants, factories, stream_app, transitions
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import row

APP = "tests.support.stream_app:setup"
POOL = ("--workers", '[{"queue": "work", "concurrency": 4}]')
EXECUTORS = {
    "executors": ("--slots", "2"), "async executor": ("--slots", "4", "--async"),
    "pool": POOL, "inline": ("--inline",), "batch": ("--batch", "4"),
}  # fmt: skip
COUNT = 2500
"""More parts than a batch has."""


@pytest.fixture
def cli(cli: Commands) -> Commands:
    stream_app.setup()
    return cli


def worker(cli: Commands, *more: str, **env: Any) -> Command:
    queue = () if "--workers" in more else ("--queue", stream_app.QUEUE)
    return cli.start("queue-claim-worker", *queue, "--app", APP, *more, **env)


def enqueued(task: str, **args: Any) -> str:
    return jobs.enqueue(task_name=task, queue=stream_app.QUEUE, args=args, max_attempts=3)


def reclaimed(job_id: str) -> bool:
    """Take the job from its dead worker, as the orchestrator does; return whether it is queued."""
    with db.connect() as conn:
        transitions.reclaim_lapsed(conn, "ingest")
    return row(job_id)["status"] == "queued"


def values(job_id: str) -> list[Any]:
    return [part.value for part in streams.read(job_id, "text")]


@pytest.mark.parametrize("shape", EXECUTORS.values(), ids=EXECUTORS)
@pytest.mark.parametrize("task", ["words", "words_async"])
def test_what_a_handler_streams_is_there_before_it_goes_on_and_all_of_it_in_order(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...], task: str
) -> None:
    job_id = enqueued(task, folder=str(tmp_path), count=COUNT)
    worker(cli, *shape)
    until(lambda: len(values(job_id)) == COUNT // 2)  # the rest of a batch comes without a call
    (tmp_path / "go").touch()
    found = [*streams.follow(job_id)]
    assert [part.value for part in found] == [*range(COUNT)]
    assert [part.id for part in found] == [f"1-{n}" for n in range(1, COUNT + 1)]
    assert row(job_id)["status"] == "completed"


def test_a_handler_in_the_process_of_its_worker_streams(cli: Commands, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    ids = [enqueued(each, folder=str(tmp_path), count=COUNT) for each in ("words", "words_async")]
    worker(cli)
    for job_id in ids:
        assert [part.value for part in streams.follow(job_id)] == [*range(COUNT)]


@pytest.mark.parametrize("shape", [("--slots", "1"), ("--inline",)], ids=["executor", "inline"])
def test_a_reader_sees_a_reset_mark_and_the_second_attempt_after_a_kill(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    job_id = enqueued("words", folder=str(tmp_path), count=COUNT)
    env = {"QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "1", "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0"}
    first = worker(cli, *shape, "--lease-seconds", "3", **env)
    until(lambda: len(values(job_id)) >= 1000)
    reader = streams.follow(job_id)
    found = [next(reader) for _ in range(1000)]
    os.kill(first.process.pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    until(lambda: reclaimed(job_id))
    worker(cli, *shape, **env)
    found += reader
    marks = [at for at, part in enumerate(found) if part.is_reset]
    assert len(marks) == 1 and found[marks[0]].claim_no == 2
    before, after = found[: marks[0]], found[marks[0] + 1 :]
    assert [part.id for part in before] == [f"1-{n}" for n in range(1, len(before) + 1)]
    assert [part.value for part in before] == [*range(len(before))]
    assert [(part.id, part.value) for part in after] == [(f"2-{n + 1}", n) for n in range(COUNT)]


def waits_for_a_lock() -> bool:
    """Return whether a statement of a worker waits for a lock."""
    with db.connect() as conn:
        found = conn.execute(
            "SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchall()
    return bool(found)


def test_parts_keep_their_order_although_a_stranger_locks_their_job_for_a_moment(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    """The worker tries the second part again later, and the third one comes meanwhile."""
    job_id = enqueued("in_turns", folder=str(tmp_path))
    worker(cli, "--slots", "1", **constants.env({"run.job_loop.FLUSH_MS": 2000.0}))
    until(lambda: values(job_id) == [0])
    with conn.transaction():
        conn.execute("UPDATE ingest_jobs SET priority = priority WHERE id = %s", (job_id,))
        until(waits_for_a_lock)
        until(lambda: not waits_for_a_lock())
    (tmp_path / "go").touch()
    until(lambda: row(job_id)["status"] != "running")
    ended = row(job_id)
    assert (ended["status"], ended["error"], ended["attempts"]) == ("completed", None, 0)
    assert values(job_id) == [0, 1, 2]


def test_a_handler_that_streams_without_a_pause_has_its_lease_renewed(
    cli: Commands, tmp_path: Path
) -> None:
    """The worker's loop stores its parts and renews its lease, which is too long to lapse here."""
    job_id = enqueued("flood", folder=str(tmp_path), least=4 * COUNT)
    env = {
        "QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "1",
        **constants.env({"tasks.attempt_requests.MAX_PARTS": 100_000_000}),
    }
    worker(cli, "--slots", "1", "--lease-seconds", "600", **env)
    leases = set[datetime]()

    def is_renewed_again_and_again() -> bool:
        found = row(job_id)
        leases.update({found["lease_expires_at"]} - {None})
        return len(leases) > 5

    until(is_renewed_again_and_again)
    (tmp_path / "go").touch()
    until(lambda: row(job_id)["status"] == "completed")
    ended = row(job_id)
    assert (ended["claim_no"], ended["crash_count"], ended["attempts"]) == (1, 0, 0)
    assert len(values(job_id)) == ended["result"]["count"] >= 4 * COUNT


def test_show_follow_prints_the_parts(cli: Commands, tmp_path: Path) -> None:
    job_id = enqueued("words", folder=str(tmp_path), count=4)
    worker(cli, "--slots", "1")
    shown = cli.start("queue-workflows", "show", job_id, "--follow")
    until(lambda: "attempt 1: text: 1" in shown.out)
    (tmp_path / "go").touch()
    assert shown.process.wait(30) == 0
    assert [line for line in shown.out.splitlines() if ": text: " in line] == [
        f"attempt 1: text: {n}" for n in range(4)
    ]


def test_run_prints_the_parts_of_its_nodes(cli: Commands, tmp_path: Path) -> None:
    """Also of nodes whose handlers run in its own processes, which print to the terminal."""
    command = cli.start(
        "queue-workflows", "run", "--app", APP, "talking", "--input", f"folder={tmp_path}",
        QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS="1",
    )  # fmt: skip
    until(lambda: "talk: text: 0\n" in command.err, timeout_s=40)
    (tmp_path / "go").touch()
    assert command.process.wait(40) == 0, command.err
    printed = [line.partition("talk: text: ")[2] for line in command.err.splitlines()]
    assert [word for word in printed if word] == ["0", "1"]


def test_show_follow_of_a_run_prints_the_parts_of_its_nodes(cli: Commands) -> None:
    with db.connect() as conn:
        run_id = factories.run(conn, status="running")
        for node_id in ("s/a", "s/b"):
            factories.node(conn, run_id, node_id, inputs={})
        held = [transitions.claim_node(conn) for _ in "ab"]

        def send(node: int, first: int, *parts: str, name: str = "text") -> None:
            assert transitions.stream(conn, held[node], first, *parts, name=name)

        def set_state(node: int, status: str) -> None:
            ended_at = None if status == "queued" else datetime.now(timezone.utc)
            conn.execute(
                "UPDATE workflow_node_jobs SET status = %s, worker_id = NULL, claimed_by = NULL,"
                " lease_expires_at = NULL, finished_at = %s WHERE id = %s",
                (status, ended_at, held[node]["id"]),
            )

        send(0, 1, "before")
        shown = cli.start("queue-workflows", "show", run_id, "--follow")
        only = cli.start("queue-workflows", "show", run_id, "--follow", "--node", "s/b")
        until(lambda: "s/a: text: before\n" in shown.out)
        send(1, 1, "other", "\x1b[31mred\u202e password=hunter2hunter2", name="lo\x1bg")
        until(lambda: "red" in shown.out and "red" in only.out)
        set_state(0, "queued")
        held[0] = transitions.claim_node(conn)
        send(0, 1, "again")
        until(lambda: "s/a: text: again\n" in shown.out)
        set_state(0, "completed")
        send(1, 3, "last")
        set_state(1, "completed")
        conn.execute(
            "UPDATE workflow_runs SET status = 'completed', finished_at = now() WHERE id = %s",
            (run_id,),
        )
    assert (shown.process.wait(30), only.process.wait(30)) == (0, 0)
    of_a = [line for line in shown.out.splitlines() if line.startswith("s/a: ")]
    of_b = [line for line in shown.out.splitlines() if line.startswith("s/b: ")]
    assert of_a == [
        "s/a: text: before",
        "s/a: attempt 2: its stream begins; parts above are of an earlier attempt",
        "s/a: text: again",
    ]
    assert of_b[0] == "s/b: lo\\x1bg: other" and of_b[2] == "s/b: text: last"
    assert of_b[1].startswith("s/b: lo\\x1bg: \\x1b[31mred\\u202e password=")
    assert "hunter2" not in shown.out and "\x1b" not in shown.out
    assert [line for line in only.out.splitlines() if line.startswith("s/")] == of_b
