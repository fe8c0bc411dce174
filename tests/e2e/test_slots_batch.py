"""A worker with `--slots` and `--batch`: executors get several short jobs at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from queue_workflows import config, db, history, jobs, workers
from tests.support import slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import begun, enqueued, row, stopped

pytestmark = pytest.mark.usefixtures("slot_tasks")

SHORT = 40
BATCH = 20


def worker(cli: Commands, slots: int, *more: str, batch: int = BATCH) -> Command:
    return cli.start(
        "queue-claim-worker", "--queue", slot_app.QUEUE, "--slots", str(slots),
        "--batch", str(batch), "--app", "tests.support.slot_app:setup", *more,
    )  # fmt: skip


def short(count: int) -> list[str]:
    return [enqueued("quick", number=number) for number in range(count)]


def in_folder(tmp_path: Path, task: str, timeout_s: float | None = None) -> tuple[str, Path]:
    """A job with a folder of its own."""
    folder = tmp_path / task
    folder.mkdir()
    args = {"folder": str(folder)}
    return jobs.enqueue(
        task_name=task, queue=slot_app.QUEUE, args=args, timeout_s=timeout_s
    ), folder


def charges(job_id: str) -> tuple[int, int]:
    """The failed attempts and crashes of a job."""
    found = row(job_id)
    return found["attempts"], found["crash_count"]


def status(wanted: str, *ids: str) -> bool:
    return all(row(each)["status"] == wanted for each in ids)


def claimed_behind(folder: Path, ids: list[str]) -> bool:
    """Whether a handler runs, and jobs behind it are claimed."""
    return begun(folder) and any(row(each)["claim_no"] for each in ids)


def test_many_short_jobs_run_once_each_and_share_statements(cli: Commands) -> None:
    ids = short(400)
    running = worker(cli, 2)
    until(lambda: status("completed", *ids))
    stopped(running)
    assert [row(each)["result"]["number"] for each in ids] == list(range(400))
    assert {row(each)["claim_no"] for each in ids} == {1}
    assert len({row(each)["result"]["pid"] for each in ids}) == 2
    with db.connect() as conn:
        found = conn.execute("SELECT count(DISTINCT finished_at) AS n FROM ingest_jobs").fetchone()
    assert found is not None
    assert found["n"] < 200


def test_what_each_job_prints_is_in_its_own_log(cli: Commands) -> None:
    first = short(SHORT)
    ids = [enqueued("meets", everyone=1, number=number) for number in range(SHORT)]
    running = worker(cli, 1)
    until(lambda: status("completed", *first, *ids))
    stopped(running)
    for number, job_id in enumerate(ids):
        found = history.get_job(job_id)
        assert found is not None
        lines = found["attempts"][0]["log"]["text"].splitlines()
        assert sorted(lines) == [f"logs {number}", f"prints {number} of {number}"]


def test_a_failure_is_that_of_its_job_alone(cli: Commands, tmp_path: Path) -> None:
    first = short(SHORT)
    failed, _ = in_folder(tmp_path, "fails")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: status("completed", *first, *behind) and status("failed", failed))
    stopped(running)
    assert row(failed)["error"] == "ValueError: as it was asked to"
    assert {charges(each) for each in behind} == {(0, 0)}


def test_what_waits_behind_a_long_handler_is_run_by_the_other_executor(
    cli: Commands, tmp_path: Path
) -> None:
    first = short(SHORT)
    long, folder = in_folder(tmp_path, "waits")
    behind = short(30)
    running = worker(cli, 2)
    until(lambda: begun(folder))
    until(lambda: status("completed", *first, *behind))
    assert status("running", long)
    assert {charges(each) for each in behind} == {(0, 0)}
    slot_app.let_go(folder)
    until(lambda: status("completed", long))
    assert row(long)["claim_no"] == 1
    stopped(running)


def test_what_waits_behind_long_handlers_is_handed_back_to_others(
    cli: Commands, tmp_path: Path
) -> None:
    first = short(SHORT)
    long, folder = in_folder(tmp_path, "waits")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: begun(folder))
    until(lambda: status("queued", *behind))
    other = worker(cli, 1)
    until(lambda: status("completed", *first, *behind))
    assert {charges(each) for each in behind} == {(0, 0)}
    slot_app.let_go(folder)
    until(lambda: status("completed", long))
    stopped(running)
    stopped(other)


def test_a_killed_executor_charges_the_job_that_ran_alone(cli: Commands, tmp_path: Path) -> None:
    first = short(SHORT)
    dies, folder = in_folder(tmp_path, "waits_once")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: claimed_behind(folder, behind))
    os.kill(slot_app.starts_of(folder)[0], signal.SIGKILL)
    until(lambda: status("completed", *first, dies, *behind))
    assert (row(dies)["claim_no"], *charges(dies)) == (2, 0, 1)
    assert {charges(each) for each in behind} == {(0, 0)}
    stopped(running)


def test_with_its_launcher_a_worker_ends_and_hands_back_what_had_not_started(
    cli: Commands, tmp_path: Path
) -> None:
    short(SHORT)
    long, folder = in_folder(tmp_path, "waits_once")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: claimed_behind(folder, behind))
    (pid,) = slot_app.starts_of(folder)
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGKILL)
    assert running.wait() == 1
    assert status("queued", long, *behind)
    assert charges(long) == (0, 1), "its handler may have sent the signal"
    assert {charges(each) for each in behind} == {(0, 0)}


def test_a_late_job_fails_and_what_waits_behind_it_runs(cli: Commands, tmp_path: Path) -> None:
    first = short(SHORT)
    late, _ = in_folder(tmp_path, "ignores_sigterm", timeout_s=1)
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: status("failed", late))
    assert "ran longer than its budget" in row(late)["error"]
    until(lambda: status("completed", *first, *behind))
    assert {charges(each) for each in behind} == {(0, 0)}
    stopped(running)


def test_a_cancelled_job_that_waits_never_starts(cli: Commands, tmp_path: Path) -> None:
    short(SHORT)
    long, folder = in_folder(tmp_path, "waits")
    waits, second = in_folder(tmp_path, "says")
    running = worker(cli, 1)
    until(lambda: begun(folder))
    jobs.cancel(waits)
    until(lambda: status("cancelled", waits))
    slot_app.let_go(folder)
    until(lambda: status("completed", long))
    assert not begun(second)
    stopped(running)


def test_hard_off_hands_all_of_them_back_uncounted(cli: Commands, tmp_path: Path) -> None:
    first = short(SHORT)
    long, folder = in_folder(tmp_path, "waits_once")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: claimed_behind(folder, behind))
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy="hard")
    until(lambda: status("queued", long, *behind))
    assert {charges(each) for each in (long, *behind)} == {(0, 0)}
    workers.enable(config.host_label(), slot_app.QUEUE)
    until(lambda: status("completed", *first, long, *behind))
    stopped(running)


def test_a_worker_that_stops_gives_back_at_once_what_waits(cli: Commands, tmp_path: Path) -> None:
    short(SHORT)
    long, folder = in_folder(tmp_path, "waits")
    behind = short(10)
    running = worker(cli, 1, "--shutdown-timeout", "60")
    until(lambda: claimed_behind(folder, behind))
    running.send(signal.SIGTERM)
    until(lambda: status("queued", *behind))
    slot_app.let_go(folder)
    assert running.wait() == 0, running.err
    assert status("completed", long)
    assert {charges(each) for each in behind} == {(0, 0)}


def test_executors_are_replaced_after_so_many_jobs(cli: Commands) -> None:
    ids = short(60)
    running = worker(cli, 1, "--max-jobs", "25", "--burst")
    assert running.wait() == 0, running.err
    pids = [row(each)["result"]["pid"] for each in ids]
    assert sorted(pids.count(each) for each in set(pids)) == [10, 25, 25]
    assert {row(each)["claim_no"] for each in ids} == {1}


def test_an_isolated_job_shares_no_process(cli: Commands) -> None:
    first = short(SHORT)
    alone = [enqueued("alone", number=number) for number in range(3)]
    last = short(SHORT)
    running = worker(cli, 1, "--burst")
    assert running.wait() == 0, running.err
    pids = {row(each)["result"]["pid"] for each in alone}
    assert len(pids) == 3
    assert not pids & {row(each)["result"]["pid"] for each in (*first, *last)}
