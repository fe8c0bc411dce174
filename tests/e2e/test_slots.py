"""A worker with slots as a real process: its jobs run in executors, each in its own process."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    config,
    db,
    dispatcher,
    history,
    jobs,
    node_queue,
    run_store,
    worker_control,
    workers,
)
from tests.support import constants, invariants, proxy, slot_app, transitions
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until
from tests.support.worker_views import begun, ended, node, node_row, row, sessions, stopped

pytestmark = pytest.mark.usefixtures("slot_tasks")

APP = "tests.support.slot_app:setup"
SCRIPT = "queue-claim-worker"
LEAVES_S = 5.0
"""Longest time in seconds for which a stopped worker may wait for its database."""
BUSY_S = 3.0
"""What a busy machine takes to notice."""
Row = dict[str, Any]


def worker(
    cli: Commands, slots: int = 2, *more: str, queue: str = slot_app.QUEUE, app: str = APP,
    **env: str,
) -> Command:  # fmt: skip
    return cli.start(SCRIPT, "--queue", queue, "--slots", str(slots), "--app", app, *more, **env)


def enqueued(task: str, args: Row, **more: Any) -> str:
    return jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=args, **more)


def in_folders(tmp_path: Path, task: str, count: int = 1, **more: Any) -> list[tuple[str, Path]]:
    """Jobs with a folder each."""
    made: list[tuple[str, Path]] = []
    for number in range(count):
        folder = tmp_path / f"{task}-{number}"
        folder.mkdir()
        made.append((enqueued(task, {"folder": str(folder)} | more), folder))
    return made


def test_jobs_run_at_once_in_processes_of_their_own(cli: Commands, tmp_path: Path) -> None:
    made = in_folders(tmp_path, "waits", count=3)
    running = worker(cli, 3)
    until(lambda: begun(*(folder for _, folder in made)))
    pids = {pid for _, folder in made for pid in slot_app.starts_of(folder)}
    assert len(pids) == 3
    assert running.process.pid not in pids
    slot_app.let_go(*(folder for _, folder in made))
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)
    results = [row(job_id)["result"]["pid"] for job_id, _ in made]
    assert set(results) == pids


def test_a_result_waits_for_no_other_handler(cli: Commands, tmp_path: Path) -> None:
    ((slow, folder),) = in_folders(tmp_path, "waits")
    running = worker(cli, 2)
    until(lambda: begun(folder))
    quick = [enqueued("quick", {"number": number}) for number in range(5)]
    until(lambda: ended(*quick))
    assert row(slow)["status"] == "running"
    slot_app.let_go(folder)
    until(lambda: ended(slow))
    stopped(running)


def test_a_worker_has_two_connections_with_one_slot_and_with_eight(
    cli: Commands, tmp_path: Path
) -> None:
    found: list[int] = []
    for slots in (1, 8):
        db.close_pool()
        before = sessions()
        (tmp_path / str(slots)).mkdir()
        made = in_folders(tmp_path / str(slots), "says", count=slots)
        running = worker(cli, slots)
        until(lambda made=made: begun(*(folder for _, folder in made)))
        until(lambda made=made: all(row(job_id)["progress"] == 0.5 for job_id, _ in made))
        db.close_pool()
        found.append(len(sessions() - before))
        slot_app.let_go(*(folder for _, folder in made))
        until(lambda made=made: ended(*(job_id for job_id, _ in made)))
        stopped(running)
    assert found == [2, 2]


def test_what_a_handler_prints_is_in_the_history_and_on_the_workers_stdout(
    cli: Commands, tmp_path: Path
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "says")
    running = worker(cli)
    until(lambda: begun(folder))
    slot_app.let_go(folder)
    until(lambda: ended(job_id))
    stopped(running)
    assert "hello from the handler" in running.out
    found = history.get_job(job_id)
    assert found is not None
    assert "hello from the handler" in found["attempts"][0]["log"]["text"]


def test_at_sigterm_a_job_that_yields_ends_there_and_others_are_handed_back(
    cli: Commands, tmp_path: Path
) -> None:
    ((yields, first),) = in_folders(tmp_path, "says")
    ((deaf, second),) = in_folders(tmp_path, "waits")
    running = worker(cli, 2, "--shutdown-timeout", str(patience(5)))
    until(lambda: begun(first, second))
    pids = slot_app.starts_of(second)
    stopped(running)
    for job_id in (yields, deaf):
        found = row(job_id)
        assert (found["status"], found["attempts"], found["crash_count"]) == ("queued", 0, 0)
    assert (first / "tidied").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_job_that_ends_within_the_shutdown_timeout_is_recorded(
    cli: Commands, tmp_path: Path
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits")
    running = worker(cli, 2, "--shutdown-timeout", "60")
    until(lambda: begun(folder))
    running.send(signal.SIGTERM)
    slot_app.let_go(folder)
    assert running.wait() == 0, running.err
    assert row(job_id)["status"] == "completed"


def test_a_cancelled_job_ends_at_its_yield_and_the_worker_goes_on(
    cli: Commands, tmp_path: Path
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "says")
    running = worker(cli)
    until(lambda: begun(folder))
    jobs.cancel(job_id)
    until(lambda: ended(job_id, status="cancelled"))
    assert (folder / "tidied").exists()
    after = enqueued("quick", {"number": 1})
    until(lambda: ended(after))
    stopped(running)


def test_a_cancelled_job_that_does_not_end_is_killed_and_the_worker_goes_on(
    cli: Commands, tmp_path: Path
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "ignores_sigterm")
    ((other, neighbour),) = in_folders(tmp_path, "waits")
    cli.env["QUEUE_WORKFLOWS_CANCEL_GRACE_S"] = "0.2"
    running = worker(cli)
    until(lambda: begun(folder, neighbour))
    (pid,) = slot_app.starts_of(folder)
    jobs.cancel(job_id)
    until(lambda: ended(job_id, status="cancelled"))
    assert not Path(f"/proc/{pid}").exists()
    slot_app.let_go(neighbour)
    until(lambda: ended(other))
    assert row(other)["claim_no"] == 1
    after = enqueued("quick", {"number": 1})
    until(lambda: ended(after))
    stopped(running)


def test_a_job_that_runs_longer_than_its_timeout_fails_and_its_neighbour_goes_on(
    cli: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "late"
    folder.mkdir()
    late = enqueued("ignores_sigterm", {"folder": str(folder)}, timeout_s=1)
    ((other, neighbour),) = in_folders(tmp_path, "waits")
    running = worker(cli)
    until(lambda: ended(late, status="failed"))
    assert "ran longer than its budget" in row(late)["error"]
    (pid,) = slot_app.starts_of(folder)
    assert not Path(f"/proc/{pid}").exists()
    assert row(late)["crash_count"] == 0
    slot_app.let_go(neighbour)
    until(lambda: ended(other))
    assert row(other)["claim_no"] == 1
    stopped(running)


def test_a_result_after_the_time_limit_was_decided_is_dropped_and_its_slot_is_used_again(
    cli: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "late"
    folder.mkdir()
    late = enqueued("ends_at_sigterm", {"folder": str(folder)}, timeout_s=1)
    running = worker(cli, 1)
    until(lambda: ended(late, status="failed"))
    assert "ran longer than its budget" in row(late)["error"]
    after = enqueued("quick", {"number": 1})
    until(lambda: ended(after))
    (pid,) = slot_app.starts_of(folder)
    until(lambda: not Path(f"/proc/{pid}").exists())
    stopped(running)


def test_an_off_worker_lets_its_jobs_end_and_claims_nothing(cli: Commands, tmp_path: Path) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits")
    running = worker(cli)
    until(lambda: begun(folder))
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy="drain")
    waiting = enqueued("quick", {"number": 1})
    slot_app.let_go(folder)
    until(lambda: ended(job_id))
    assert row(waiting)["status"] == "queued"
    workers.enable(config.host_label(), slot_app.QUEUE)
    until(lambda: ended(waiting))
    stopped(running)


def test_hard_off_kills_the_executors_and_hands_their_jobs_back(
    cli: Commands, tmp_path: Path
) -> None:
    made = in_folders(tmp_path, "waits_once", count=2)
    running = worker(cli)
    until(lambda: begun(*(folder for _, folder in made)))
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy="hard")
    try:
        until(lambda: ended(*(job_id for job_id, _ in made), status="queued"))
    except AssertionError:
        raise AssertionError(running.err) from None
    for job_id, folder in made:
        assert not Path(f"/proc/{slot_app.starts_of(folder)[0]}").exists()
        assert (row(job_id)["crash_count"], row(job_id)["attempts"]) == (0, 0)
    assert running.process.poll() is None
    workers.enable(config.host_label(), slot_app.QUEUE)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)


@pytest.mark.parametrize("options", [("--slots", "1"), ()], ids=["slots", "plain"])
def test_a_stop_policy_of_the_app_is_obeyed(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits_once")
    app = ("--app", "tests.support.slot_app:setup_policy")
    running = cli.start("queue-claim-worker", "--queue", slot_app.QUEUE, *options, *app)
    until(lambda: begun(folder))
    host = config.host_label()
    monkeypatch.setitem(worker_control.STOP_POLICIES, "own", slot_app.own_policy)
    workers.disable(host, slot_app.QUEUE, stop_policy="own")
    assert running.wait() == 90, running.err
    assert (row(job_id)["status"], row(job_id)["crash_count"]) == ("queued", 0)
    with db.connect() as conn:
        found = conn.execute(
            "SELECT detail ->> 'reason' AS reason FROM ingest_job_events"
            " WHERE job_id = %s AND event_type = 'requeued'",
            [job_id],
        ).fetchone()
    assert found is not None
    assert found["reason"].startswith(f"own policy of {host} in ")
    assert "it does not return" not in running.err


def test_a_stop_policy_of_the_app_may_have_any_reason(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits_once")
    running = worker(cli, 1, app="tests.support.slot_app:setup_policy")
    until(lambda: begun(folder))
    monkeypatch.setitem(worker_control.STOP_POLICIES, "odd", slot_app.odd_policy)
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy="odd")
    until(lambda: row(job_id)["status"] != "running")
    assert (row(job_id)["status"], row(job_id)["error"]) == ("queued", None)
    stopped(running)


@pytest.mark.parametrize(
    ("name", "words"),
    [("fails", "fails has failed: ValueError: no"), ("slow", "slow takes more than 10 s")],
)
def test_a_stop_policy_of_the_app_that_fails_is_hard(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits_once")
    app = ("--app", "tests.support.slot_app:setup_policy")
    running = cli.start("queue-claim-worker", "--queue", slot_app.QUEUE, *app)
    until(lambda: begun(folder))
    monkeypatch.setitem(worker_control.STOP_POLICIES, name, slot_app.failing_policy)
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy=name)
    assert running.wait() == 79, running.err
    assert f"stop policy {words}; stopping hard" in running.err
    assert (row(job_id)["status"], row(job_id)["crash_count"]) == ("queued", 0)


def test_a_stop_policy_of_the_app_ends_with_the_switch_that_began_it(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes too long, and its queue is turned ON, and OFF by another policy, meanwhile."""
    ((job_id, folder),) = in_folders(tmp_path, "waits")
    limit = constants.env({"run.stop_policy.WITHIN_S": 4.0})
    running = worker(cli, 1, app="tests.support.slot_app:setup_policy", **limit)
    until(lambda: begun(folder))
    host = config.host_label()
    monkeypatch.setitem(worker_control.STOP_POLICIES, "slow", slot_app.slow_policy)
    workers.disable(host, slot_app.QUEUE, stop_policy="slow")
    until(lambda: "slow policy in " in running.err)
    found = re.search(r"slow policy in (\d+);", running.err)
    assert found is not None
    workers.enable(host, slot_app.QUEUE)
    workers.disable(host, slot_app.QUEUE, stop_policy="drain")
    until(lambda: not Path(f"/proc/{found[1]}").exists())
    slot_app.let_go(folder)
    until(lambda: ended(job_id))
    assert row(job_id)["claim_no"] == 1
    stopped(running)


def test_a_stop_policy_that_no_descriptor_is_left_for_is_hard(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits_once")
    app = ("--app", "tests.support.slot_app:setup_policy")
    running = cli.start("queue-claim-worker", "--queue", slot_app.QUEUE, *app)
    until(lambda: begun(folder))
    limit = resource.RLIMIT_NOFILE
    resource.prlimit(running.process.pid, limit, (3, resource.getrlimit(limit)[1]))
    monkeypatch.setitem(worker_control.STOP_POLICIES, "own", slot_app.own_policy)
    workers.disable(config.host_label(), slot_app.QUEUE, stop_policy="own")
    assert running.wait() == 79, running.err
    assert "stop policy own cannot begin" in running.err
    assert row(job_id)["crash_count"] == 0


def test_sigterm_does_not_wait_for_a_database_that_does_not_answer(
    cli: Commands, dsn: str, tmp_path: Path
) -> None:
    ((job_id, folder),) = in_folders(tmp_path, "waits_once")
    with proxy.Proxy(dsn) as wire:
        cli.env["QUEUE_WORKFLOWS_DB_URL"] = wire.dsn
        running = worker(cli, 1, "--shutdown-timeout", "0.2")
        until(lambda: begun(folder))
        wire.freeze()
        running.send(signal.SIGTERM)
        assert running.wait(LEAVES_S + BUSY_S) == 0, running.err
        assert not Path(f"/proc/{slot_app.starts_of(folder)[0]}").exists()
        wire.thaw()
        assert (row(job_id)["status"], row(job_id)["crash_count"]) == ("running", 0)
        with db.connect() as conn:
            conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s'")
            transitions.reclaim_lapsed(conn, "ingest")
        again = worker(cli, 1)
        until(lambda: ended(job_id))
        assert row(job_id)["crash_count"] == 0
        stopped(again)


def test_an_executor_is_replaced_after_so_many_jobs(cli: Commands) -> None:
    ids = [enqueued("quick", {"number": number}) for number in range(6)]
    running = worker(cli, 1, "--max-jobs", "2", "--burst")
    assert running.wait() == 0, running.err
    pids = [row(each)["result"]["pid"] for each in ids]
    assert len(set(pids)) == 3


def test_an_isolated_task_has_a_process_of_its_own_for_each_job(cli: Commands) -> None:
    tasks = ("quick", "alone", "quick", "alone", "alone", "quick")
    ids = [enqueued(task, {"number": number}) for number, task in enumerate(tasks)]
    running = worker(cli, 1, "--burst")
    assert running.wait() == 0, running.err
    pids = [row(each)["result"]["pid"] for each in ids]
    alone = {pid for pid, task in zip(pids, tasks, strict=True) if task == "alone"}
    assert len(alone) == 3
    assert not alone & {pid for pid, task in zip(pids, tasks, strict=True) if task == "quick"}


# --- apps with a launcher of their own ---------------------------------------------------------

OWN_LAUNCHER = """
import logging, sys, threading
import queue_workflows
from queue_workflows.claim_worker import ClaimWorker, main

logging.basicConfig(level="INFO")
queue_workflows.configure(ingest_queues=("work",))
queue_workflows.register_ingest_task("mine", lambda *, number: {"number": number, "word": WORD})
WORD = sys.argv[2]
if sys.argv[1] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1] == "main":
    sys.exit(main(["--queue", "work", "--slots", "2", "--burst"]))
ClaimWorker(queue="work", slots=2).run_forever()
"""


@pytest.mark.parametrize("way", ["main", "class", "threads"])
def test_an_app_with_a_launcher_of_its_own_keeps_its_configuration(
    cli: Commands, tmp_path: Path, way: str
) -> None:
    (tmp_path / "own.py").write_text(OWN_LAUNCHER)
    config.register_ingest_task("mine", print)
    ids = [enqueued("mine", {"number": number}) for number in range(3)]
    started = cli.start("python", str(tmp_path / "own.py"), way, "hello")
    until(lambda: ended(*ids))
    if way == "main":
        assert started.wait() == 0, started.err
    else:
        started.send(signal.SIGKILL)
        started.wait()
    assert [row(each)["result"]["word"] for each in ids] == ["hello"] * 3
    assert ("cannot fork executors" in started.err) == (way == "threads")
    assert ("--app" in started.err) == (way == "threads")


def test_an_app_whose_import_starts_threads_is_loaded_by_each_executor(cli: Commands) -> None:
    ids = [enqueued("quick", {"number": number}) for number in range(4)]
    running = worker(cli, 2, "--burst", app="tests.support.slot_app:setup_threads")
    assert running.wait() == 0, running.err
    assert ended(*ids)


# --- nodes -------------------------------------------------------------------------------------


def started(name: str, out_dir: Path | None = None) -> str:
    """A run of the app's workflow, with its first nodes queued."""
    run_id = run_store.insert_run(workflow_name=name, out_dir=out_dir)["id"]
    dispatcher.start_run(run_id)
    return run_id


def run_ended(*ids: str) -> bool:
    return all((run_store.get_run(each) or {}).get("status") == "completed" for each in ids)


def test_runs_go_on_from_node_to_node_without_an_orchestrator(cli: Commands) -> None:
    ids = [started(name) for name in ("chain", "fan") for _ in range(5)]
    running = worker(cli, 4, queue="cpu")
    until(lambda: run_ended(*ids))
    stopped(running)
    jobs_of = [row for each in ids for row in node_queue.list_jobs_for_run(each)]
    assert len(jobs_of) == 5 * (3 + 2 + slot_app.WIDTH)
    assert {row["status"] for row in jobs_of} == {"completed"}
    assert {row["claim_no"] for row in jobs_of} == {1}
    assert {row["context_delta"]["sum"] for row in jobs_of} >= {2, 101}
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=30) == []


def test_a_cancelled_run_ends_its_node_and_a_neighbour_goes_on(
    cli: Commands, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    cancelled, other = (node("node_waits", folder=str(each)) for each in (first, second))
    running = worker(cli, 2, queue="cpu")
    until(lambda: begun(first, second))
    queue_workflows.cancel_run(node_row(cancelled)["run_id"])
    until(lambda: node_row(cancelled)["status"] == "cancelled")
    slot_app.let_go(second)
    until(lambda: node_row(other)["status"] == "completed")
    assert node_row(other)["context_delta"]["cancelled"] is False
    stopped(running)


def test_a_node_that_sets_its_own_event_is_not_cancelled(cli: Commands) -> None:
    job_id = node("node_stops_threads")
    running = worker(cli, 1, queue="cpu")
    until(lambda: node_row(job_id)["status"] == "completed")
    assert node_row(job_id)["context_delta"] == {"ended": True}
    assert node_row(job_id)["claim_no"] == 1
    stopped(running)


def test_an_input_node_is_parked_without_an_executor(cli: Commands) -> None:
    asks = node("__input__choose_one", widget="choose_one", target="x")
    running = worker(cli, 1, queue="cpu")
    until(lambda: node_row(asks)["status"] == "awaiting_input")
    stopped(running)


def test_a_nodes_progress_is_stored_while_it_runs(cli: Commands, tmp_path: Path) -> None:
    job_id = node("node_reports", folder=str(tmp_path))
    running = worker(cli, 1, queue="cpu")
    until(lambda: node_row(job_id)["progress"] == 0.25)
    slot_app.let_go(tmp_path)
    until(lambda: node_row(job_id)["status"] == "completed")
    stopped(running)


def test_the_apps_hooks_run_in_the_executor(cli: Commands, tmp_path: Path) -> None:
    run_id = started("chain", tmp_path)
    running = worker(cli, 1, queue="cpu", app="tests.support.slot_app:setup_hooks")
    until(lambda: run_ended(run_id))
    until(lambda: (tmp_path / "announced").read_text().count("\n") == 3)
    stopped(running)
    lines = (tmp_path / "announced").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, "completed"] for name in ("s/a", "s/b", "s/c")
    ]
    assert str(running.process.pid) not in {line.split()[-1] for line in lines}
    found = node_queue.list_jobs_for_run(run_id)
    assert [row["context_delta"]["seen"] for row in found] == [
        [name, "chain"] for name in ("s/a", "s/b", "s/c")
    ]


@pytest.mark.parametrize("hooks", [False, True])
def test_short_nodes_are_sent_in_batches_unless_the_app_announces_them(
    cli: Commands, tmp_path: Path, hooks: bool
) -> None:
    """Without a batch, two slots have at most four claims: those that run and one for each slot."""
    ids = [started("fan", tmp_path) for _ in range(12)]
    setup = "setup_hooks" if hooks else "setup"
    running = worker(cli, 2, "--batch", "10", queue="cpu", app=f"tests.support.slot_app:{setup}")
    until(lambda: all(run_ended(each) for each in ids))
    nodes = [job for each in ids for job in node_queue.list_jobs_for_run(each)]
    assert {job["claim_no"] for job in nodes} == {1}
    if hooks:
        until(lambda: (tmp_path / "announced").read_text().count("\n") == len(nodes))
    stopped(running)
    with db.connect() as conn:
        found = conn.execute(
            "WITH each AS ("
            "  SELECT xid, max(id) AS id, sum(CASE event_type WHEN 'claimed' THEN 1"
            "    WHEN 'completed' THEN -1 ELSE 0 END) AS change"
            "  FROM workflow_node_events WHERE event_type IN ('claimed', 'completed') GROUP BY xid)"
            " SELECT max(n) AS most FROM (SELECT sum(change) OVER (ORDER BY id) AS n FROM each) s"
        ).fetchone()
    assert found is not None
    assert (found["most"] > 4) is not hooks


def test_nodes_after_an_apps_own_refs_are_dispatched_by_the_orchestrator(cli: Commands) -> None:
    slot_app.setup_resolver()
    run_id = started("own")
    running = worker(cli, 1, queue="cpu", app="tests.support.slot_app:setup_resolver")

    def statuses() -> dict[str, str]:
        return {row["node_id"]: row["status"] for row in node_queue.list_jobs_for_run(run_id)}

    until(lambda: statuses()["s/a"] == "completed")
    dispatcher.on_node_completed(run_id, "s/a")
    until(lambda: statuses().get("s/b") in ("completed", "skipped"))
    stopped(running)
    assert statuses() == {"s/a": "completed", "s/b": "completed"}


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--queue", "gpu", "--slots", "2"), "--cards 0,1 starts a worker for each"),
        (("--queue", "gpu", "--slots", "1", "--batch", "2"), "--batch, --async and several slots"),
        (("--queue", "gpu", "--supervise", "--batch", "2"), "--batch, --async and several slots"),
        (("--queue", "work", "--slots", "0"), "must be positive"),
        (("--queue", "work", "--slots", "1", "--supervise", "--burst"), "exclude --supervise"),
        (("--queue", "work", "--inline", "--max-jobs", "2"), "exclude --inline"),
        (("--queue", "work", "--batch", "0"), "must be positive"),
        (("--queue", "work", "--slots", "2", "--batch", "0"), "must be positive"),
        (("--queue", "work", "--slots", "2", "--batch", "5", "--async"), "exclude each other"),
        (("--queue", "work", "--async"), "--slots N"),
        (("--queue", "gpu", "--slots", "2", "--async"), "--batch, --async and several slots"),
        (("--workers", '[{"queue": "load"}]', "--slots", "2"), "`concurrency` instead"),
        (("--workers", '[{"queue": "load"}]', "--async"), "--slots N"),
    ],
)
def test_what_cannot_work_is_refused(cli: Commands, more: tuple[str, ...], words: str) -> None:
    refused = cli.start(SCRIPT, *more, "--app", APP)
    assert refused.wait() == 2
    assert words in refused.err


def test_an_app_that_cannot_be_loaded_is_named(cli: Commands) -> None:
    refused = cli.start(SCRIPT, "--queue", "work", "--slots", "2", "--app", "no_such_app_here")
    assert refused.wait() == 2
    assert "no_such_app_here" in refused.err
