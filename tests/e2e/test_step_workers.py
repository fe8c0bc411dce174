"""Handlers in executors have steps, and what a step has returned survives kills of its process."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, events, jobs
from tests.support import constants, factories, step_app, transitions
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import row

pytestmark = pytest.mark.usefixtures("step_tasks")
APP = "tests.support.step_app:setup"
KILLS = 200
JOBS = 4
"""Jobs that share the kills, since each attempt reads all earlier steps of its job."""
POOL = ("--workers", '[{"queue": "work", "concurrency": 4}]')
SHAPES = pytest.mark.parametrize(
    "shape",
    [("--slots", "2"), ("--slots", "4", "--async"), ("--batch", "3"), ("--inline",), POOL],
    ids=["executors", "async executor", "batches", "inline", "pool"],
)


def worker(cli: Commands, *more: str, **env: str) -> Command:
    queue = () if "--workers" in more else ("--queue", step_app.QUEUE)
    argv = ("queue-claim-worker", *queue, "--app", APP, *more)
    return cli.start(*argv, **env)


def enqueued(task: str, folder: Path, **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    policy = {"max_attempts": 101, "backoff": {"kind": "constant", "base_s": 0.1}}
    args = {"folder": str(folder)} | more
    return jobs.enqueue(task_name=task, queue=step_app.QUEUE, args=args, **policy)


@SHAPES
def test_steps_of_every_kind_of_handler_in_every_kind_of_worker(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    tasks = ("two", "two_async", "large", "in_threads")
    ids = {task: enqueued(task, tmp_path / task) for task in tasks}
    worker(cli, *shape)
    for task in ("two", "two_async", "large"):
        until(lambda task=task: row(ids[task])["attempts"] >= 2)
        (tmp_path / task / "go").touch()
    until(lambda: all(row(each)["status"] == "completed" for each in ids.values()))
    for task in ("two", "two_async"):
        assert row(ids[task])["result"] == {"found": ["first", "b"]}
        assert sorted(step_app.lines(tmp_path / task)) == [("b", 1), ("first", 1)]
    assert row(ids["large"])["result"] == {"length": step_app.LARGE}
    assert row(ids["in_threads"])["result"] == {"found": ["a", "b"]}


@SHAPES
def test_a_handler_that_waits_takes_no_slot_and_goes_on_with_its_event(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    ids = {task: enqueued(task, tmp_path / task, key=task) for task in ("waits", "waits_async")}
    worker(cli, *shape)
    for job_id in ids.values():
        until(lambda job_id=job_id: row(job_id)["blocked_reason"] == "not_due")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "go").touch()
    other = enqueued("two", tmp_path / "two")
    until(lambda: row(other)["status"] == "completed")
    for task, job_id in ids.items():
        events.send("go", key=task, value=task)
        until(lambda job_id=job_id: row(job_id)["status"] == "completed")
        assert row(job_id)["result"] == {"found": task, "after": "after"}
        assert step_app.lines(tmp_path / task) == [("before", 1), ("after", 2)]
        assert (row(job_id)["attempts"], row(job_id)["crash_count"]) == (0, 0)


@SHAPES
def test_a_loop_goes_on_where_its_attempt_ended(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    ids = {task: enqueued(task, tmp_path / task, count=20) for task in ("epochs", "epochs_async")}
    worker(cli, *shape)
    for task, job_id in ids.items():
        until(lambda job_id=job_id: row(job_id)["status"] == "completed")
        made = step_app.lines(tmp_path / task)
        assert [int(number) for number, _ in made] == [*range(11), *range(10, 20)]
        found = {step["kind"]: (step["state"], step["position"]) for step in jobs.steps(job_id)}
        assert found == {"cursor": ("done", 20), "sleep": ("done", 0)}


@pytest.mark.parametrize("shape", [("--slots", "1"), ("--inline",)], ids=["executor", "inline"])
def test_after_a_crash_a_loop_goes_on_from_its_last_renewal(
    cli: Commands, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    folder = tmp_path / "epochs"
    job_id = enqueued("epochs", folder, count=20)
    (folder / "die").touch()
    env = {"QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "1", "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0"}
    worker(cli, *shape, "--lease-seconds", "6", **env)
    until(lambda: [step["position"] for step in jobs.steps(job_id)] == [10])
    (folder / "die").unlink()
    (folder / "now").touch()
    if "--inline" in shape:
        until(lambda: _is_lapsed(job_id))
        with db.connect() as conn:
            transitions.reclaim_lapsed(conn, "ingest")
        worker(cli)
    until(lambda: row(job_id)["status"] == "completed")
    # Nobody saw the inline worker die, so its lapsed lease counts no crash.
    assert row(job_id)["crash_count"] == ("--inline" not in shape)
    assert [int(number) for number, _ in step_app.lines(folder)][:12] == [*range(11), 10]


def _is_lapsed(job_id: str) -> bool:
    with db.connect() as conn:
        lapsed = "SELECT lease_expires_at < now() FROM ingest_jobs WHERE id = %s"
        return factories.one(conn, lapsed, job_id)


def executors_of(pid: int) -> list[int]:
    """Return the processes below a worker that have run handlers: its grandchildren."""
    found: list[int] = []
    for child in _children(pid):
        found += _children(child)
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.timeout(600)
def test_a_recorded_step_is_done_once_under_200_random_kills(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(20)
    constants.put(monkeypatch, "claim.recovery.MAX_CRASHES", 1000)
    env = constants.env({"claim.recovery.MAX_CRASHES": 1000})
    env["QUEUE_WORKFLOWS_CRASH_BACKOFF_S"] = "0"
    subject = worker(cli, "--slots", "1", **env)
    for number in range(JOBS):
        folder = tmp_path / f"many{number}"
        job_id = enqueued("many", folder, count=100_000, pause_s=0.002)
        for kill in range(1, KILLS // JOBS + 1):
            more = chance.randrange(1, 4)
            until(lambda f=folder, k=kill, m=more: _calls_since(f, k) >= m)
            for pid in executors_of(subject.process.pid):
                os.kill(pid, signal.SIGKILL)
            until(lambda job_id=job_id, kill=kill: row(job_id)["crash_count"] == kill)
        (folder / "go").touch()
        until(lambda job_id=job_id: row(job_id)["status"] == "completed")
        check(job_id, folder)
    subject.send(signal.SIGTERM)
    subject.wait()


def _calls_since(folder: Path, claim: int) -> int:
    return sum(made >= claim for _, made in step_app.lines(folder))


def check(job_id: str, folder: Path) -> None:
    """Assert that no step was called again once its result was recorded."""
    found = jobs.steps(job_id)
    done = {step["key"]: step["claim_no"] for step in found if step["state"] == "done"}
    calls: dict[str, list[int]] = {}
    for key, claim in step_app.lines(folder):
        calls.setdefault(key, []).append(claim)
    assert len(done) >= KILLS // JOBS / 2
    for key, claim in done.items():
        assert calls[key].count(claim) == 1, key
        assert max(calls[key]) == claim, key
    assert sum(len(claims) - 1 for claims in calls.values()) <= KILLS // JOBS
    assert sum(step["crashes"] for step in found) >= KILLS // JOBS / 4


def test_an_executor_that_dies_in_a_step_ends_by_the_crash_budget_which_names_it(
    cli: Commands, tmp_path: Path
) -> None:
    job_id = enqueued("dies", tmp_path / "dies")
    worker(cli, "--slots", "1", QUEUE_WORKFLOWS_CRASH_BACKOFF_S="0")
    until(lambda: row(job_id)["status"] == "failed")
    error = row(job_id)["error"]
    assert re.match(r"poison: took down 3 workers.*SIGKILL.*; in step deadly$", error)
    found = {step["name"]: (step["state"], step["crashes"]) for step in jobs.steps(job_id)}
    assert found == {"fine": ("done", 0), "deadly": ("running", 3)}
    assert step_app.lines(tmp_path / "dies") == [("fine", 1)]


def test_show_prints_the_steps_and_retry_repeats_from_one(cli: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    job_id = enqueued("two", folder)
    subject = worker(cli, "--slots", "1")
    until(lambda: row(job_id)["attempts"] >= 1)
    jobs.cancel(job_id)
    until(lambda: row(job_id)["status"] == "cancelled")
    shown = cli.run("queue-workflows", "show", job_id, "--steps")
    lines = [line.split()[:5] for line in shown.out.splitlines()]
    assert lines[1:] == [["first", "done", "1", "0", "1"], ["second", "done", "1", "0", "1"]]
    full = cli.run("queue-workflows", "show", job_id, "--steps", "--full").out
    assert f'arguments: ("{folder}", "first")' in full
    (folder / "go").touch()
    refused = cli.run("queue-workflows", "retry", job_id, "--from-step", "third")
    assert "has no step 'third'; its steps: first, second" in refused.err
    assert len(refused.err.splitlines()) == 1
    again = cli.run("queue-workflows", "retry", job_id, "--from-step", "second")
    assert again.process.returncode == 0, again.err
    until(lambda: row(job_id)["status"] == "completed")
    assert [word for word, _ in step_app.lines(folder)] == ["first", "b", "b"]
    subject.send(signal.SIGTERM)
    assert subject.wait() == 0
