"""When a worker claims nothing because memory is full, and when it goes on."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from queue_workflows import config
from queue_workflows.telemetry import pressure
from queue_workflows.worker import memory_watch
from tests.support.wait import until


class Worker:
    """A worker whose memory, whose jobs, and what others run are set."""

    def __init__(self) -> None:
        self.now, self.use = 0.0, pressure.Reading()
        self.busy, self.gives_back, self.away = False, False, False
        self.others: set[str] = set()
        """Whose memory the jobs of other workers fill."""
        self.asked: list[list[str]] = []
        self.calls: list[str] = []
        runner: Any = SimpleNamespace(shed=lambda: self.calls.append("full"))
        who = SimpleNamespace(worker_id="w1")
        self.queue = SimpleNamespace(jobs={}, runner=runner, who=who)
        desk: Any = SimpleNamespace(
            queues=[self.queue], throttled=False, now=lambda: self.now,
            look=lambda: self.calls.append("released"),
        )  # fmt: skip
        self.desk = desk
        self.memory = memory_watch.MemoryWatch(
            desk, post=lambda _: None, later=self._later,
            changed=lambda: self.calls.append("changed"),
        )  # fmt: skip
        self.memory._memory.read = lambda: self.use  # type: ignore[method-assign]

    def _later(self, script: Any, what: str, done: Any, failed: Any) -> None:
        given = next(script).parameters
        assert (given["but"], given["stale_s"]) == (["w1"], 30.0)
        if self.away:
            failed()
            return
        self.asked.append([*given["memory"]])
        done({} if not self.others.isdisjoint(given["memory"]) else None)

    def at(self, **use: Any) -> bool:
        self.now, self.use = self.now + 5, pressure.Reading(**use)
        self.queue.jobs = {"j": 1} if self.busy else {}
        self.queue.runner.gives_back = self.gives_back
        if self.memory._resources:
            self.memory._read()
        self.memory.tick()
        return self.desk.throttled


@pytest.fixture
def worker() -> Worker:
    return Worker()


(MACHINE,), (CONTAINER,) = pressure.ids([pressure.MACHINE]), pressure.ids(["32:7"])


def test_it_waits_while_its_own_job_runs_and_goes_on_below_the_second_value(
    worker: Worker,
) -> None:
    worker.busy = True
    assert not worker.at(ram=89.9)
    assert worker.at(ram=90)
    assert worker.at(ram=80)
    assert not worker.at(ram=79.9)
    assert worker.asked == [], "its own jobs can free memory: nobody is asked about others"


def test_it_says_what_is_full_and_whose_memory_it_fills(worker: Worker) -> None:
    assert worker.memory.detail() == {"throttle": None, "memory": [MACHINE]}
    worker.busy = True
    worker.at(ram=93.14)
    assert worker.memory.detail()["throttle"] == "RAM at 93.1 % (limit 90 %)"
    worker.at(ram=70)
    assert worker.memory.detail()["throttle"] is None


def test_its_loop_hears_of_each_check_while_memory_is_full_and_of_the_end(worker: Worker) -> None:
    worker.busy = True
    for use in (50, 95, 95, 50, 50):
        worker.at(ram=use)
    assert worker.calls == ["full", "changed", "full", "changed", "released"]


def test_without_a_job_here_it_waits_for_jobs_that_fill_the_same_memory(worker: Worker) -> None:
    worker.others = {CONTAINER}
    assert worker.at(ram=95, ram_of="32:7")
    assert not worker.at(ram=95), "the machine is full, and those jobs are in a container"
    assert not worker.at(swap=95, ram=95)
    assert worker.at(swap=95, swap_of="32:7")
    assert worker.asked == [[CONTAINER], [MACHINE], [MACHINE], [CONTAINER]]


def test_while_nothing_of_ours_runs_it_warns_once_and_claims(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    assert not any(worker.at(ram=95) for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no job of these workers runs" in caplog.text


def test_it_goes_on_when_the_last_job_has_ended_although_memory_is_full(worker: Worker) -> None:
    worker.busy, worker.others = True, {MACHINE}
    assert worker.at(ram=95)
    worker.busy = False
    assert worker.at(ram=95)
    worker.others.clear()
    assert not worker.at(ram=95)


def test_it_waits_for_executors_that_are_about_to_give_memory_back(worker: Worker) -> None:
    worker.gives_back = True
    assert worker.at(ram=95)
    worker.gives_back = False
    assert not worker.at(ram=95)


def test_without_a_database_it_stays_as_it_was(worker: Worker) -> None:
    worker.away = True
    assert not worker.at(ram=95)
    worker.busy = True
    assert worker.at(ram=95)
    worker.busy = False
    assert worker.at(ram=95)
    worker.away = False
    assert not worker.at(ram=95)


def test_one_line_when_it_begins_and_one_when_it_ends(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker.busy = True
    for use in (91.26, 92, 91.26, 70, 60):
        worker.at(ram=use)
    assert [record.message for record in caplog.records] == [
        "🚨 MEMORY THROTTLE ACTIVE: RAM at 91.3 % (limit 90 %)",
        "✅ MEMORY THROTTLE RELEASED after 15 s: RAM at 70.0 % (limit 90 %)",
    ]


@pytest.mark.parametrize(
    ("names", "ram", "swap", "gpu"),
    [
        (None, True, True, False),
        ("ram", True, False, False),
        (" Swap, GPU", False, True, True),
        ("off", False, False, False),
        ("", False, False, False),
        ("vram", True, True, False),
    ],
)
def test_the_variable_names_the_memory_that_counts(
    monkeypatch: pytest.MonkeyPatch, names: str | None, ram: bool, swap: bool, gpu: bool
) -> None:
    if names is not None:
        monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_MEMORY_THROTTLE", names)
    worker = Worker()
    worker.busy = True
    found = [worker.at(**{each: 99}) for each in ("ram", "swap", "gpu")]
    assert found == [ram, swap, gpu]


def test_an_unknown_name_gives_the_default_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_MEMORY_THROTTLE", "ram,disk")
    for _ in range(2):
        assert config.worker_memory_throttle() == {"ram", "swap"}
    (record,) = caplog.records
    assert "ram,disk" in record.message
    assert "gpu, ram, swap" in record.message


def test_memory_is_read_again_and_again_on_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMORY_CHECK_INTERVAL", "0.01")
    worker, woken = Worker(), list[str]()
    worker.memory._post = lambda _: woken.append(threading.current_thread().name)
    with worker.memory:
        until(lambda: len(woken) > 3)
    assert set(woken) == {"worker-memory"}


def test_switched_off_it_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_MEMORY_THROTTLE", "off")
    before = threading.active_count()
    with Worker().memory:
        assert threading.active_count() == before
