"""Hostile handlers: each has an outcome or a death record, and the other executor continues."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import constants, executors
from tests.support.wait import until


@pytest.fixture
def beside(launcher: executors.Launched) -> Generator[executors.Worker]:
    """An executor of the same launcher, which must go on."""
    with executors.forked(launcher) as found:
        found.task("add", {"a": 1, "b": 1})
        yield found
        assert found.task("add", {"a": 2, "b": 2}).kind == "completed"


@pytest.mark.parametrize(
    ("name", "code", "signum"), [("segfaults", None, signal.SIGSEGV), ("exits", 3, None)]
)
def test_a_death_is_reported_exactly(
    worker: executors.Worker,
    beside: executors.Worker,
    name: str,
    code: int | None,
    signum: int | None,
) -> None:
    job = worker.send_task(name)
    died = worker.death()
    assert (died["code"], died["signal"]) == (code, signum)
    assert job.outcome is None
    assert job.death is not None
    assert job.death.detail["signal"] == signum


def test_output_before_a_death_is_stored(worker: executors.Worker) -> None:
    job = worker.send_task("segfaults")
    worker.death()
    assert "about to fall" in worker.text
    assert job.death is not None
    assert job.printed == b"about to fall\n"


@pytest.mark.parametrize(
    ("name", "error"),
    [("sys_exits", "the handler called sys.exit('enough')"), ("interrupts", "KeyboardInterrupt")],
)
def test_an_exit_by_exception_is_a_failure_and_the_executor_goes_on(
    worker: executors.Worker, name: str, error: str
) -> None:
    outcome = worker.task(name)
    assert (outcome.kind, outcome.error) == ("failed", error)
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_a_handler_that_holds_the_gil_in_c_disturbs_nobody_but_itself(
    worker: executors.Worker, beside: executors.Worker
) -> None:
    job = worker.send_task("holds_gil", {"s": 2})
    for _ in range(20):
        assert beside.task("add", {"a": 1, "b": 1}).kind == "completed"
    assert worker.outcome(job).kind == "completed"


@pytest.mark.parametrize(
    ("name", "args"), [("holds_gil", {"s": 3600}), ("evil_regex", {}), ("ignores_sigterm", {})]
)
def test_a_kill_ends_a_handler_that_ignores_requests(
    worker: executors.Worker, beside: executors.Worker, name: str, args: dict[str, int]
) -> None:
    worker.send_task(name, args)
    worker.turn(0.2)
    worker.kill()
    assert worker.death()["signal"] == signal.SIGKILL


def test_a_handler_that_closes_all_descriptors_is_a_lost_channel(
    worker: executors.Worker, beside: executors.Worker
) -> None:
    job = worker.send_task("closes_everything", {"s": 0.1})
    assert worker.death()["code"] == constants.value("run.wire.LOST")
    assert job.death is not None
    assert "its channel to the worker was closed in it" in job.death.evidence


def test_a_lost_channel_is_seen_while_the_handler_runs(worker: executors.Worker) -> None:
    worker.send_task("closes_everything", {"s": 3600})
    assert worker.death()["code"] == constants.value("run.wire.LOST")


def test_garbage_in_the_channel_names_itself(
    worker: executors.Worker, beside: executors.Worker
) -> None:
    job = worker.send_task("writes_garbage")
    worker.death()
    assert "garbage in the channel" in worker.place.lost
    assert "\n" not in worker.place.lost
    assert job.death is not None
    assert "the channel to its executor was lost: garbage" in job.death.evidence


def test_children_that_outlive_the_handler_hold_nothing_up(
    worker: executors.Worker, beside: executors.Worker
) -> None:
    child = json.loads(worker.task("forks_children").result)["result"]
    try:
        assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"
        worker.executors.let_go(worker.place)
        assert worker.death()["code"] == 0
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_prints_for_ever_holds_nothing_up(worker: executors.Worker) -> None:
    child = json.loads(worker.task("leaves_a_printing_child").result)["result"]
    try:
        assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"
        worker.executors.let_go(worker.place)
        assert worker.death()["code"] == 0
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_returns_from_the_handler_sends_nothing(
    worker: executors.Worker,
) -> None:
    worker.task("forks_children", {"returns": True})
    for number in range(3):
        assert json.loads(worker.task("add", {"a": number, "b": 0}).result)["sum"] == number
    assert len(worker.ended_jobs) == 4


def test_reports_of_a_forked_child_are_dropped(worker: executors.Worker) -> None:
    job = worker.send_task("reporting_child")
    assert json.loads(worker.outcome(job).result)["result"] == 5
    assert not job.reports


def test_a_handler_may_close_the_first_descriptors(worker: executors.Worker) -> None:
    assert worker.task("closes_some").kind == "completed"
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_a_kill_ends_the_children_of_a_handler_too(worker: executors.Worker) -> None:
    child = json.loads(worker.task("forks_children").result)["result"]
    worker.kill()
    worker.death()
    until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    try:
        return state(Path(f"/proc/{pid}/stat")) != "Z"
    except FileNotFoundError:
        return False


def state(stat: Path) -> str:
    return stat.read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_a_forked_child_ends_by_sigterm_and_its_executor_does_not(
    worker: executors.Worker,
) -> None:
    assert json.loads(worker.task("terminates_child").result)["result"] == -signal.SIGTERM
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_an_app_that_replaces_json_changes_nothing(worker: executors.Worker) -> None:
    assert json.loads(worker.task("replaces_json").result) == {"replaced": True}
    assert json.loads(worker.task("add", {"a": 1, "b": 2}).result)["sum"] == 3
    assert worker.task("fails").kind == "failed"


def test_a_hundred_megabytes_of_output_neither_block_nor_stay_in_memory(
    worker: executors.Worker,
) -> None:
    worker.keep_printed = False
    worker.task("prints_much", {"mb": 100})
    worker.until(lambda: worker.printed_bytes >= 100_000_014)
    assert worker.printed_bytes == 100_000_014


def test_exceptions_of_signal_handlers_leave_the_channel_whole(worker: executors.Worker) -> None:
    outcome = worker.task("alarms", {"n": 20})
    assert outcome.kind == "completed", outcome.error
    assert json.loads(outcome.result)["result"] == 20
    assert worker.logged
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_an_alarm_between_two_jobs_does_not_end_the_executor(worker: executors.Worker) -> None:
    for number in range(300):
        worker.task("alarm_later", {"s": 1e-5 + number * 2e-6})
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_messages_of_several_threads_do_not_mix(worker: executors.Worker) -> None:
    assert worker.task("logs_from_threads", {"n": 200}).kind == "completed"
    lines = sorted(worker.logged)
    assert lines == sorted(f"line {n}" for n in range(200) for _ in range(4))


def test_an_executor_that_the_worker_does_not_read_waits_and_goes_on(
    worker: executors.Worker,
) -> None:
    job = worker.send_task("logs_from_threads", {"n": 2000})
    until(lambda: sleeping(worker.pid))
    assert worker.outcome(job).kind == "completed"


def test_a_worker_does_not_wait_for_an_executor_that_does_not_read(
    worker: executors.Worker, beside: executors.Worker
) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    job = worker.send_task("add", {"a": 1, "b": 1, "more": "x" * 20_000_000})
    assert beside.task("add", {"a": 1, "b": 1}).kind == "completed"
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.outcome(job).kind == "completed"


def test_a_job_that_its_executor_has_not_read_is_not_charged(worker: executors.Worker) -> None:
    """A crash takes seconds while the kernel writes a core, and the channel is open meanwhile."""
    worker.task("add", {"a": 1, "b": 1})
    os.kill(worker.pid, signal.SIGSTOP)
    job = worker.send_task("add", {"a": 2, "b": 2})
    os.kill(worker.pid, signal.SIGKILL)
    worker.until(lambda: job.death)
    assert job.death is not None
    assert job.death.killed_for == "its executor ended before it read this job"


def test_a_job_that_its_executor_has_read_is_charged_even_if_no_more_came(
    worker: executors.Worker,
) -> None:
    job = worker.send_task("until_cancelled")
    worker.until(lambda: len(job.reports) == 2)
    os.kill(worker.pid, signal.SIGKILL)
    worker.until(lambda: job.death)
    assert job.death is not None
    assert (job.death.killed_for, job.death.evidence[:17]) == ("", "killed by SIGKILL")


def test_a_dead_executor_gets_no_job_while_its_last_outcome_is_read(
    worker: executors.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.task("add", {"a": 1, "b": 1})  # the first one also says that it starts
    usable: list[bool] = []
    monkeypatch.setattr(worker, "room", lambda: usable.append(worker.place.usable))
    job = worker.send_task("add", {"a": 1, "b": 1})
    until(lambda: select.select([worker.place.channel], [], [], 0)[0])
    os.kill(worker.pid, signal.SIGKILL)
    worker.executors.died({"died": worker.pid} | constants.value("run.executors.UNKNOWN"))
    assert job.outcome is not None
    assert not any(usable)


def sleeping(pid: int) -> bool:
    """Whether every thread of the process waits, for the fifth time in a row."""
    for _ in range(5):
        if any(state(stat) != "S" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
            return False
        time.sleep(0.01)
    return True
