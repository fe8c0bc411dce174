"""A pool as a real process: one worker of several queues, whose jobs run in executors."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from queue_workflows import claim_worker, config, db, errors, history, jobs, workers
from tests.support import app_triggers, commands, constants, rows_before_checks, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until
from tests.support.worker_views import charges, ended, row, sessions, stopped

APP = "tests.support.slot_app:setup"
SCRIPT = "queue-claim-worker"
ONE, OTHER = slot_app.QUEUE, "more"
LENGTHS = {ONE: 3, OTHER: 2}
WORKERS = json.dumps([{"queue": queue, "concurrency": most} for queue, most in LENGTHS.items()])


@pytest.fixture(autouse=True)
def app(slot_tasks: None) -> None:
    config.configure(ingest_queues=(ONE, OTHER))


def pool(cli: Commands, *more: str, wanted: str = WORKERS, **env: str) -> Command:
    return cli.start(SCRIPT, "--workers", "--app", APP, *more, WORKERS_JSON=wanted, **env)


def in_folders(
    tmp_path: Path, task: str, count: int = 1, *, queue: str = ONE, **more: Any
) -> list[tuple[str, Path]]:
    """Jobs with a folder each; `timeout_s` is for the job, the rest are args."""
    made: list[tuple[str, Path]] = []
    options = {key: more.pop(key) for key in ("timeout_s",) if key in more}
    for number in range(count):
        folder = tmp_path / f"{queue}-{task}-{number}"
        folder.mkdir()
        args = {"folder": str(folder)} | more
        job_id = jobs.enqueue(task_name=task, queue=queue, args=args, **options)
        made.append((job_id, folder))
    return made


def quick(count: int, queue: str = ONE) -> list[str]:
    args = [{"number": number} for number in range(count)]
    return jobs.enqueue_many(task_name="quick", queue=queue, args=args)


def begun(*made: tuple[str, Path], times: int = 1) -> bool:
    return all(len(slot_app.starts_of(folder)) >= times for _, folder in made)


def pids(*made: tuple[str, Path]) -> set[int]:
    return {pid for _, folder in made for pid in slot_app.starts_of(folder)}


def let_go(*made: tuple[str, Path]) -> None:
    slot_app.let_go(*(folder for _, folder in made))


UNTOUCHED = (1, 0, 0)


# --- side by side -----------------------------------------------------------------------------


def test_as_many_run_at_once_as_configured_and_the_next_when_one_ends(
    cli: Commands, tmp_path: Path
) -> None:
    made = in_folders(tmp_path, "waits", 4) + in_folders(tmp_path, "waits", 3, queue=OTHER)
    first = [*made[:3], *made[4:6]]
    running = pool(cli)
    until(lambda: begun(*first))
    with db.connect() as conn:
        found = conn.execute(
            "SELECT queue, count(*) AS n, count(DISTINCT worker_id) AS workers FROM ingest_jobs"
            " WHERE status = 'running' GROUP BY queue"
        ).fetchall()
    assert {each["queue"]: (each["n"], each["workers"]) for each in found} == {
        ONE: (3, 1),
        OTHER: (2, 1),
    }
    assert len(pids(*first)) == 5, "each has a process of its own"
    let_go(made[1])
    until(lambda: begun(made[3]))
    assert pids(made[3]) == pids(made[1]), "the process is used again"
    assert not begun(made[6])
    let_go(*made)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)
    assert {charges(job_id) for job_id, _ in made} == {UNTOUCHED}


def test_async_jobs_of_a_queue_share_a_process_and_others_run_beside_them(
    cli: Commands, tmp_path: Path
) -> None:
    wanted = json.dumps([{"queue": queue, "concurrency": 12} for queue in LENGTHS])
    shared = in_folders(tmp_path, "async_waits", 10)
    others = in_folders(tmp_path, "async_waits", 10, queue=OTHER)
    own = in_folders(tmp_path, "waits", 2)
    running = pool(cli, wanted=wanted)
    until(lambda: begun(*shared, *others, *own))
    assert [len(pids(*each)) for each in (shared, others, own)] == [1, 1, 2]
    assert len(pids(*shared, *others, *own)) == 4
    assert running.process.pid not in pids(*shared, *others, *own)
    let_go(*shared, *others, *own)
    until(lambda: ended(*(job_id for job_id, _ in [*shared, *others, *own])))
    stopped(running)


def test_each_of_many_short_jobs_runs_once(cli: Commands) -> None:
    ids = quick(100) + quick(100, OTHER)
    running = pool(cli)
    until(lambda: ended(*ids))
    stopped(running)
    assert {row(each)["claim_no"] for each in ids} == {1}
    used = {(row(each)["queue"], row(each)["result"]["pid"]) for each in ids}
    assert all(Counter(queue for queue, _ in used)[queue] <= LENGTHS[queue] for queue in LENGTHS)


class Held(NamedTuple):
    """What the history says of the claims of a queue."""

    most: int
    """How many claims were held at once, after each transaction."""
    transactions: int
    """How many transactions claimed or recorded."""


def held(queue: str) -> Held:
    with db.connect() as conn:
        found = conn.execute(
            "WITH each AS ("
            "  SELECT xid, max(id) AS id, bool_or(event_type <> 'requeued') AS is_step,"
            "    sum(CASE event_type WHEN 'claimed' THEN 1 ELSE -1 END) AS change"
            "  FROM ingest_job_events WHERE queue = %s"
            "    AND event_type IN ('claimed', 'completed', 'requeued') GROUP BY xid),"
            " sums AS (SELECT is_step, sum(change) OVER (ORDER BY id) AS n FROM each)"
            " SELECT max(n) AS most, count(*) FILTER (WHERE is_step) AS transactions FROM sums",
            [queue],
        ).fetchone()
    assert found is not None
    return Held(found["most"], found["transactions"])


@pytest.mark.parametrize("task", ["quick", "async_quick"])
def test_short_jobs_are_claimed_ahead_so_that_their_results_share_statements(
    cli: Commands, task: str
) -> None:
    args = [{"number": number} for number in range(300)]
    ids = jobs.enqueue_many(task_name=task, queue=ONE, args=args)
    # A statement takes longer than the handlers of its jobs on any machine.
    with db.connect() as conn, app_triggers.slow(conn, "ingest_jobs", "true", 0.002):
        running = pool(cli)
        until(lambda: ended(*ids))
        stopped(running)
    found = held(ONE)
    assert (
        LENGTHS[ONE] < found.most <= LENGTHS[ONE] * (1 + constants.value("worker.queue_state.EACH"))
    )
    assert found.transactions < len(ids) / 2


def test_nothing_is_claimed_ahead_beside_a_job_that_may_have_killed_a_worker(
    cli: Commands, tmp_path: Path
) -> None:
    (crashed,) = in_folders(tmp_path, "waits")
    with db.connect() as conn:
        conn.execute(b"UPDATE ingest_jobs SET crash_count = 1 WHERE id = %s", (crashed[0],))
    running = pool(cli)
    until(lambda: begun(crashed))
    ids = quick(300)
    until(lambda: ended(*ids))
    assert held(ONE).most == LENGTHS[ONE]
    let_go(crashed)
    until(lambda: ended(crashed[0]))
    stopped(running)


def test_a_pool_has_two_connections_however_much_it_runs(cli: Commands, tmp_path: Path) -> None:
    db.close_pool()
    before = sessions()
    made = in_folders(tmp_path, "waits", 3) + in_folders(tmp_path, "async_waits", 2, queue=OTHER)
    running = pool(cli)
    until(lambda: begun(*made))
    db.close_pool()
    assert len(sessions() - before) == 2
    let_go(*made)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)


def test_each_handler_has_a_log_of_its_own(cli: Commands) -> None:
    args = [{"everyone": 2, "number": number} for number in range(2)]
    ids = jobs.enqueue_many(task_name="meets", queue=ONE, args=args)
    running = pool(cli)
    until(lambda: ended(*ids))
    stopped(running)
    for number, job_id in enumerate(ids):
        found = history.get_job(job_id)
        assert found is not None
        lines = found["attempts"][0]["log"]["text"].splitlines()
        assert sorted(lines) == [f"logs {number}", f"prints {number} of {number}"]


def test_each_queue_is_shown_as_a_worker_with_its_jobs(cli: Commands, tmp_path: Path) -> None:
    made = in_folders(tmp_path, "waits", 2)
    running = pool(cli, QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC="0.1")
    wanted = {ONE: ("busy", [job_id for job_id, _ in made]), OTHER: ("idle", [])}

    def shown() -> dict[str, tuple[str, list[str]]]:
        with db.connect() as conn:
            found = conn.execute("SELECT queue, state, job_ids FROM workers").fetchall()
        return {each["queue"]: (each["state"], each["job_ids"]) for each in found}

    until(lambda: shown() == wanted)
    with db.connect() as conn:
        beats = conn.execute("SELECT queue, concurrency FROM worker_heartbeats").fetchall()
    assert {each["queue"]: each["concurrency"] for each in beats} == LENGTHS
    let_go(*made)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)
    assert {state for state, _ in shown().values()} == {"stopped"}


# --- one of many ------------------------------------------------------------------------------


def test_a_crash_is_charged_to_its_job_and_no_neighbour_notices(
    cli: Commands, tmp_path: Path
) -> None:
    beside = [
        *in_folders(tmp_path, "waits"),
        *in_folders(tmp_path, "async_waits"),
        *in_folders(tmp_path, "waits", queue=OTHER),
    ]
    running = pool(cli)
    until(lambda: begun(*beside))
    ((victim, folder),) = in_folders(tmp_path, "waits_once")
    until(lambda: begun((victim, folder)))
    os.kill(slot_app.starts_of(folder)[0], signal.SIGKILL)
    until(lambda: ended(victim))
    let_go(*beside)
    until(lambda: ended(*(job_id for job_id, _ in beside)))
    stopped(running)
    assert charges(victim) == (2, 0, 1)
    assert {charges(job_id) for job_id, _ in beside} == {UNTOUCHED}


def test_a_crash_of_a_shared_process_is_charged_to_the_async_jobs_of_its_queue(
    cli: Commands, tmp_path: Path
) -> None:
    shared = in_folders(tmp_path, "async_waits_once", 2)
    beside = in_folders(tmp_path, "waits")
    beside += in_folders(tmp_path, "async_waits", queue=OTHER)
    running = pool(cli)
    until(lambda: begun(*shared, *beside))
    (pid,) = pids(*shared)
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(*(job_id for job_id, _ in shared)))
    let_go(*beside)
    until(lambda: ended(*(job_id for job_id, _ in beside)))
    stopped(running)
    assert {charges(job_id) for job_id, _ in shared} == {(2, 0, 1)}
    assert {charges(job_id) for job_id, _ in beside} == {UNTOUCHED}


def test_an_async_job_whose_next_crash_is_its_last_runs_alone_in_a_process_of_its_own(
    cli: Commands, tmp_path: Path
) -> None:
    last, other = made = in_folders(tmp_path, "async_waits", 2)
    with db.connect() as conn:
        conn.execute("UPDATE ingest_jobs SET crash_count = 2 WHERE id = %s", [last[0]])
    running = pool(cli)
    until(lambda: begun(last))
    let_go(*made)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    stopped(running)
    assert len(pids(*made)) == 2
    assert row(other[0])["started_at"] >= row(last[0])["finished_at"]


def cancel(job_id: str) -> None:
    jobs.cancel(job_id)


def take_away(job_id: str) -> None:
    with db.connect() as conn:
        conn.execute("UPDATE ingest_jobs SET status = 'queued' WHERE id = %s", [job_id])


def overrun(job_id: str) -> None:
    """Its time limit, given when it was queued, is over soon."""


@pytest.mark.parametrize(
    ("act", "ends_as", "task"),
    [
        (cancel, "cancelled", "ignores_sigterm"),
        (take_away, "completed", "ignores_sigterm"),
        (overrun, "failed", "ignores_sigterm"),
        (overrun, "failed", "ends_at_sigterm"),
        (cancel, "cancelled", "async_waits_once"),
    ],
)
def test_a_job_that_must_end_ends_alone(
    cli: Commands, tmp_path: Path, act: Any, ends_as: str, task: str
) -> None:
    beside = in_folders(tmp_path, "waits") + in_folders(tmp_path, "async_waits")
    beside += in_folders(tmp_path, "async_waits", queue=OTHER)
    limit = {"timeout_s": 0.5} if act is overrun else {}
    ((victim, folder),) = in_folders(tmp_path, task, **limit)
    grace = {
        "QUEUE_WORKFLOWS_CANCEL_GRACE_S": "0.2",
        "QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S": "0.2",
    }
    running = pool(cli, wanted=WORKERS.replace("3", "5"), **grace)
    until(lambda: begun(*beside, (victim, folder)))
    act(victim)
    until(lambda: ended(victim, status=ends_as))
    let_go(*beside)
    until(lambda: ended(*(job_id for job_id, _ in beside)))
    stopped(running)
    assert row(victim)["crash_count"] == 0
    assert {charges(job_id) for job_id, _ in beside} == {UNTOUCHED}


def test_a_handler_that_keeps_the_gil_past_its_time_limit_fails_alone(
    cli: Commands, tmp_path: Path
) -> None:
    beside = in_folders(tmp_path, "waits") + in_folders(tmp_path, "async_waits", queue=OTHER)
    ((victim, _),) = in_folders(tmp_path, "holds_gil", seconds=60.0, timeout_s=1.0)
    running = pool(cli)
    until(lambda: ended(victim, status="failed"))
    assert begun(*beside)
    let_go(*beside)
    until(lambda: ended(*(job_id for job_id, _ in beside)))
    stopped(running)
    assert {charges(job_id) for job_id, _ in beside} == {UNTOUCHED}


def test_a_hard_off_of_one_queue_leaves_the_other_at_work(cli: Commands, tmp_path: Path) -> None:
    mine = in_folders(tmp_path, "waits") + in_folders(tmp_path, "async_waits")
    others = in_folders(tmp_path, "waits", queue=OTHER)
    running = pool(cli)
    until(lambda: begun(*mine, *others))
    workers.disable(config.host_label(), ONE)
    until(lambda: ended(*(job_id for job_id, _ in mine), status="queued"))
    later = quick(1, OTHER)
    until(lambda: ended(*later))
    assert ended(*(job_id for job_id, _ in mine), status="queued"), "nothing of it is claimed"
    workers.enable(config.host_label(), ONE)
    until(lambda: begun(*mine, times=2))
    let_go(*mine, *others)
    until(lambda: ended(*(job_id for job_id, _ in [*mine, *others])))
    stopped(running)
    assert {charges(job_id) for job_id, _ in mine} == {(2, 0, 0)}
    assert {charges(job_id) for job_id, _ in others} == {UNTOUCHED}


# --- the worker ends, or loses its database -----------------------------------------------------


def test_at_sigterm_what_ends_in_time_is_recorded_and_the_rest_handed_back(
    cli: Commands, tmp_path: Path
) -> None:
    ends = in_folders(tmp_path, "waits")
    stays = in_folders(tmp_path, "ignores_sigterm")
    stays += in_folders(tmp_path, "async_deaf", queue=OTHER)
    timeout_s = patience(5)
    running = pool(cli, "--shutdown-timeout", str(timeout_s))
    until(lambda: begun(*ends, *stays))
    running.send(signal.SIGTERM)
    asked = time.monotonic()
    let_go(*ends)
    assert running.wait() == 0, running.err
    assert timeout_s - 0.1 <= time.monotonic() - asked <= timeout_s + patience(10)
    assert ended(ends[0][0])
    assert ended(*(job_id for job_id, _ in stays), status="queued")
    assert {charges(job_id) for job_id, _ in stays} == {UNTOUCHED}


def test_the_jobs_of_a_killed_worker_are_charged_and_run_once_more(
    cli: Commands, tmp_path: Path
) -> None:
    made = in_folders(tmp_path, "waits_once", 2)
    made += in_folders(tmp_path, "async_waits_once", 2, queue=OTHER)
    parent = pool(cli, "--supervise", "--shutdown-timeout", "0.2")
    until(lambda: begun(*made))
    with db.connect() as conn:
        found = conn.execute("SELECT DISTINCT pid FROM workers").fetchall()
    assert len(found) == 1, "one process serves both queues"
    os.kill(found[0]["pid"], signal.SIGKILL)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    assert {charges(job_id) for job_id, _ in made} == {(2, 0, 1)}
    stopped(parent)


def test_results_survive_the_loss_of_all_connections(cli: Commands, tmp_path: Path) -> None:
    made = in_folders(tmp_path, "waits", 2) + in_folders(tmp_path, "async_waits", 2, queue=OTHER)
    running = pool(cli)
    until(lambda: begun(*made))
    with db.connect() as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            "   AND backend_type = 'client backend'"
        )
    db.close_pool()
    let_go(*made)
    until(lambda: ended(*(job_id for job_id, _ in made)))
    later = quick(3) + quick(3, OTHER)
    until(lambda: ended(*later))
    stopped(running)
    assert {charges(job_id) for job_id, _ in made} == {UNTOUCHED}


def test_rows_that_cannot_be_loaded_fail_and_hold_nothing_up(cli: Commands) -> None:
    first = quick(1)
    running = pool(cli, QUEUE_WORKFLOWS_CLAIM_POLL_S="3600")
    until(lambda: ended(*first))
    with db.connect() as conn:
        for number in range(3):
            columns = {"id": f"'bad-{number}'", "task_name": "'quick'", "queue": f"'{ONE}'"}
            rows_before_checks.put(conn, "ingest_jobs", **columns, args="'[1]'::jsonb")
        # One notification for all: no other poll follows before CLAIM_POLL_S.
        conn.execute(
            "INSERT INTO ingest_jobs (id, task_name, queue, args)"
            " SELECT 'good-' || i, 'quick', %s, '{\"number\": 1}' FROM generate_series(1, 7) i",
            [ONE],
        )
    until(lambda: ended(*(f"good-{number}" for number in range(1, 8))))
    until(lambda: ended(*(f"bad-{number}" for number in range(3)), status="failed"))
    stopped(running)
    assert charges("bad-0") == (1, 1, 0)


# --- how it is configured -----------------------------------------------------------------------


def test_a_pool_serves_queues_that_the_app_does_not_name(cli: Commands) -> None:
    config.configure(ingest_queues=(ONE, "load.new"))
    ids = quick(2, "load.new")
    running = pool(cli, wanted='[{"queue": "load.new"}]')
    until(lambda: ended(*ids))
    stopped(running)
    assert running.err.count("works on") == 1


def test_wrong_entries_are_refused_by_name(cli: Commands) -> None:
    bad = '[{"queue": "gpu"}, {"queue": "work", "concurrency": 0}]'
    said = commands.refused(cli.run(SCRIPT, "--workers", bad))
    assert "workers[0]: queue 'gpu' runs workflow nodes" in said
    assert "; workers[1]: concurrency 0: a whole number from 1 to 500" in said
    said = commands.refused(cli.run(SCRIPT, "--workers", WORKERS_JSON="[{}]"))
    assert "WORKERS_JSON[0]: `queue` is missing" in said
    said = commands.refused(cli.run(SCRIPT, "--workers", WORKERS, "--batch", "5"))
    assert "--batch needs --queue" in said


# --- executors that are replaced, and a pool that ends by itself ---------------------------------


def own_pid(job_id: str) -> int:
    return row(job_id)["result"]["pid"]


@pytest.mark.parametrize("task", ["quick", "async_quick"])
def test_executors_of_each_queue_are_replaced_after_so_many_jobs(cli: Commands, task: str) -> None:
    args = [{"number": number} for number in range(6)]
    ids = [jobs.enqueue_many(task_name=task, queue=queue, args=args) for queue in (ONE, OTHER)]
    wanted = json.dumps([{"queue": queue} for queue in (ONE, OTHER)])
    running = pool(cli, "--max-jobs", "2", "--burst", wanted=wanted)
    assert running.wait() == 0, running.err
    for of_queue in ids:
        assert ended(*of_queue)
        assert sorted(Counter(map(own_pid, of_queue)).values()) == [2, 2, 2]


def test_a_shared_executor_ends_with_its_last_job_while_its_successor_runs_others(
    cli: Commands, tmp_path: Path
) -> None:
    made = in_folders(tmp_path, "async_waits", 3)
    running = pool(cli, "--max-jobs", "2")
    until(lambda: begun(*made))
    starts = Counter(pid for one in made for pid in pids(one))
    assert sorted(starts.values()) == [1, 2]
    waiting = in_folders(tmp_path, "waits")
    assert not begun(*waiting)
    let_go(made[0])
    until(lambda: begun(*waiting))
    let_go(*made, *waiting)
    until(lambda: ended(*(job_id for job_id, _ in [*made, *waiting])))
    (full,) = [pid for pid, count in starts.items() if count == 2]
    until(lambda: not Path(f"/proc/{full}").exists())
    stopped(running)
    assert {charges(job_id) for job_id, _ in made} == {UNTOUCHED}


def test_an_executor_that_has_grown_is_replaced(cli: Commands, tmp_path: Path) -> None:
    ((large, _),) = in_folders(tmp_path, "grows", megabytes=1)
    others = quick(2)
    running = pool(cli, "--max-rss-mb", "1", "--burst", wanted=json.dumps([{"queue": ONE}]))
    assert running.wait() == 0, running.err
    assert ended(large, *others)
    assert len({own_pid(each) for each in (large, *others)}) == 3


def test_a_burst_runs_what_all_queues_have_and_ends(cli: Commands, tmp_path: Path) -> None:
    ids = quick(20) + quick(20, OTHER)
    last = in_folders(tmp_path, "waits", queue=OTHER)
    running = pool(cli, "--burst")
    until(lambda: ended(*ids) and begun(*last))
    assert running.process.poll() is None, "a job of one queue keeps the pool"
    later = quick(1)
    until(lambda: ended(*later))
    let_go(*last)
    assert running.wait() == 0, running.err
    assert ended(*(job_id for job_id, _ in last))


def test_a_pool_ends_once_all_its_queues_were_idle_for_so_long(
    cli: Commands, tmp_path: Path
) -> None:
    last = in_folders(tmp_path, "async_waits", queue=OTHER)
    running = pool(cli, "--idle-exit", "0.5")
    until(lambda: begun(*last))
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1)
    assert running.process.poll() is None, "a job of one queue keeps the pool"
    let_go(*last)
    assert running.wait() == 0, running.err
    assert ended(*(job_id for job_id, _ in last))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--max-jobs", "0"), "must be positive"),
        (("--idle-exit", "-1"), "must be positive"),
        (("--burst", "--supervise"), "exclude --supervise"),
        (("--idle-exit", "5", "--supervise"), "exclude --supervise"),
    ],
)
def test_limits_that_cannot_work_are_refused(
    cli: Commands, more: tuple[str, ...], words: str
) -> None:
    refused = pool(cli, *more)
    assert refused.wait() == 2
    assert words in refused.err


PROGRAM = """
import signal
from queue_workflows import claim_worker
from tests.support import slot_app
slot_app.setup()
pool = claim_worker.WorkerPool([{"queue": "load.new", "concurrency": 2}], lease_s=60)
signal.signal(signal.SIGTERM, lambda *_: pool.stop())
pool.run_forever()
print("ended", flush=True)
"""


def test_a_program_starts_a_pool_with_its_own_configuration(cli: Commands, tmp_path: Path) -> None:
    config.configure(ingest_queues=(ONE, "load.new"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ids = quick(5, "load.new")
    running = cli.start("python", str(program), PYTHONPATH=str(Path.cwd()))
    until(lambda: ended(*ids))
    stopped(running)
    assert running.out == "ended\n"


def test_a_pool_is_refused_in_a_process_with_threads(db: ModuleType) -> None:
    subject = claim_worker.WorkerPool([{"queue": ONE}])
    over, found = threading.Event(), list[BaseException]()
    thread = threading.Thread(target=over.wait, name="other")
    thread.start()
    try:
        subject.run_forever()
    except errors.InvalidConfig as error:
        found.append(error)
    finally:
        over.set()
        thread.join()
    assert "threads run in it" in str(found[0]) and "queue-claim-worker --workers" in str(found[0])
