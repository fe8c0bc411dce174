"""The launcher: it loads the app once, forks, reports deaths, and nothing outlives the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, errors, model_cache, model_registry
from tests.support import clocks, constants, executor_app, executors
from tests.support.wait import patience, until
from tests.support.worker_views import alive, state

ROOT = Path(__file__).parents[2]


# Loading.


def test_the_worker_learns_what_the_app_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN_BEFORE", "1")

    def load() -> None:
        executor_app.load()
        config.configure(db_url_env="OWN_URL", ingest_queues=["own"], video_model_ids=["v"])
        config.set_invoke_context(lambda job, run: contextlib.nullcontext())
        config.set_on_node_completed(lambda job, run, delta: None)
        model_registry.register(model_registry.ModelSpec("m", lambda: 1, est_vram_gb=2))
        os.environ["OWN_URL"] = "postgresql:///x"
        del os.environ["GIVEN_BEFORE"]

    with executors.launched(load) as launcher:
        found = launcher.registered
    assert "segfaults" in found.tasks
    assert found.async_tasks == ["coroutine", "endless_await", "meets", "stream"]
    assert (found.knows_nodes, found.announces) == (True, True)
    assert found.models == {"m": 2.0}
    assert not config.get_config().ingest_task_map
    executors.apply(found)
    assert os.environ["OWN_URL"] == "postgresql:///x"
    assert "GIVEN_BEFORE" not in os.environ
    assert config.database_url() == "postgresql:///x"
    assert config.get_config().ingest_queues == {"own"}
    assert config.get_config().ingest_task_queues["add"] == "load"
    os.environ.pop("OWN_URL")


def registers_many() -> None:
    executor_app.load()
    for number in range(10_000):
        config.register_ingest_task(f"a_task_with_quite_a_long_name_{number:050d}", print)


def test_the_worker_learns_of_many_tasks() -> None:
    """What the app has registered takes more bytes than the kernel lets one packet have."""
    with executors.launched(registers_many) as launcher:
        assert len(launcher.registered.tasks) > 10_000
        with executors.forked(launcher) as worker:
            assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def raises(error: BaseException) -> Callable[[], None]:
    def load() -> None:
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (errors.InvalidConfig("no such app"), errors.InvalidConfig, "^no such app$"),
        (RuntimeError("broken"), errors.AppFailed, "RuntimeError: broken"),
        (SystemExit("bye"), errors.AppFailed, "SystemExit: bye"),
        (KeyboardInterrupt(), errors.AppFailed, "KeyboardInterrupt"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_an_error_in_the_worker(
    error: BaseException, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught, executors.launched(raises(error)):
        raise AssertionError("it was loaded")
    assert type(caught.value) is kind
    assert "in load" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("ends", "text"),
    [(lambda: os._exit(3), "exit code 3"), (lambda: os.kill(os.getpid(), 9), "SIGKILL")],
)
def test_an_app_that_ends_the_launcher_is_an_error(ends: Callable[[], None], text: str) -> None:
    with pytest.raises(executors.LauncherLost, match=text), executors.launched(ends):
        raise AssertionError("it was loaded")


def starts_a_thread() -> None:
    executor_app.load()
    threading.Thread(target=threading.Event().wait, name="apps-own", daemon=True).start()


def test_executors_load_an_app_that_starts_threads_each_for_itself() -> None:
    with executors.launched(starts_a_thread) as launcher:
        assert "add" in launcher.registered.tasks
        for _ in range(2):
            with executors.forked(launcher) as worker:
                assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_a_worker_with_threads_must_not_fork() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, name="another")
    other.start()
    try:
        assert "another" in str(executors.forbids_a_fork())
    finally:
        stop.set()
        other.join()


# Models and hooks.


def with_model() -> None:
    executor_app.load()
    model_registry.register(model_registry.ModelSpec("m", lambda: "the handle", est_vram_gb=3))


def test_the_model_stays_loaded_and_its_state_is_reported() -> None:
    with (
        executors.launched(with_model, model_cache=model_cache.ModelCache) as launcher,
        executors.forked(launcher) as worker,
    ):
        for _ in range(2):
            outcome = worker.node("modelled", required_model="m")
            assert json.loads(outcome.result) == {"handle": "the handle"}
        events = [name for job in worker.jobs for name in job.events]
        assert events == ["model_load_start", "model_load_done"]
        last = worker.models[-1]
        assert (last["current"], last["loading"], last["vram_gb"]) == ("m", None, 3.0)
        assert worker.executors.change_model({"model": None, "idle_only": False})
        worker.until(lambda: worker.models[-1]["current"] is None)


def with_loads_that_last() -> None:
    """A load of a model, and a context of the app, that last until their job is cancelled."""
    executor_app.load()

    def lasts() -> None:
        job = queue_workflows.current_job()
        print("it lasts", flush=True)
        until(lambda: job.cancel_requested)

    @contextlib.contextmanager
    def invoked(job: Any, run: Any) -> Generator[None]:
        if job["required_model"] is None:
            lasts()
        yield

    def unwanted(**_: Any) -> None:
        print("the handler runs", flush=True)

    async def unwanted_async(**_: Any) -> None:
        unwanted()

    model_registry.register(model_registry.ModelSpec("lasts", lasts))
    config.set_invoke_context(invoked)
    config.register_node("unwanted", unwanted)
    config.register_node("unwanted_async", unwanted_async)


@pytest.mark.parametrize("model", ["lasts", None], ids=["load", "context"])
@pytest.mark.parametrize("node", ["unwanted", "unwanted_async"])
def test_a_handler_does_not_begin_once_its_job_is_cancelled(node: str, model: str | None) -> None:
    with (
        executors.launched(with_loads_that_last, model_cache=model_cache.ModelCache) as launcher,
        executors.forked(launcher) as worker,
    ):
        worker.answers = {"rows": {"job": {"required_model": model}, "run": {}}}
        job = worker.send_node(node, required_model=model)
        worker.until(lambda: "it lasts" in worker.text)
        worker.interrupt(job, "cancelled")
        assert worker.outcome(job).kind == "cancelled"
        assert "the handler runs" not in worker.text
        # The model is of use to the next job.
        assert [each["current"] for each in worker.models[-1:]] == ([model] if model else [])


def hooked() -> None:
    executor_app.load()

    @contextlib.contextmanager
    def invoked(job: Any, run: Any) -> Generator[Any]:
        yield lambda delta: delta | {"run": run["name"]}

    def completed(job: Any, run: Any, delta: Any) -> None:
        print("completed", job["id"], run["name"], delta, flush=True)
        if job.get("fails"):
            raise SystemExit("the hook fails")

    config.set_invoke_context(invoked)
    config.set_on_node_completed(completed)
    config.get_config().resolve_ref = lambda value, context: context["whole"]


def test_the_hooks_of_the_app_run_in_the_executor() -> None:
    with executors.launched(hooked) as launcher, executors.forked(launcher) as worker:
        found = launcher.registered
        assert (found.announces, found.resolves_refs) == (True, True)
        rows = {"job": {"id": "j", "fails": True}, "run": {"name": "r"}}
        worker.answers = {"context": {"whole": 8}, "rows": rows}
        row = {"input_template": {"x": {"$from": "a"}}}
        job = worker.send_node("echo", {"x": 1}, **row)
        assert json.loads(worker.outcome(job).result) == {"got": {"x": 8}, "run": "r"}
        worker.executors.expect_announcement(worker.place)
        worker.executors.announce(worker.place, job.key, json.dumps(rows).encode())
        assert not worker.place.usable
        worker.until(lambda: worker.place.usable)
        worker.until(lambda: "completed j r {'got': {'x': 8}" in worker.text)
        assert worker.node("echo", {"x": 1}, **row).kind == "completed"


def test_an_executor_that_keeps_a_value_for_the_hook_is_not_let_go() -> None:
    """An outage may delay the record of the node for longer than an idle executor is kept."""
    with executors.launched(hooked) as launcher, executors.forked(launcher) as worker:
        rows = {"job": {"id": "j"}, "run": {"name": "r"}}
        worker.answers = {"context": {"whole": 8}, "rows": rows}
        job = worker.send_node("echo", {"x": 1}, input_template={"x": {"$from": "a"}})
        worker.outcome(job)
        worker.executors.expect_announcement(worker.place)
        worker.executors.tick(clocks.boot_s() + constants.value("run.executors.LET_GO_S") + 1.0)
        worker.executors.announce(worker.place, job.key, json.dumps(rows).encode())
        worker.until(lambda: "completed j r {'got': {'x': 8}" in worker.text)


def moves() -> None:
    """A hook and a model whose code goes to another folder."""
    executor_app.load()
    config.set_on_node_completed(lambda job, run, delta: os.chdir("/"))
    config.register_node("where", lambda: {"folder": os.getcwd()})  # noqa: PTH109  a text

    def loads() -> int:
        os.chdir("/")
        return 1

    model_registry.register(model_registry.ModelSpec("m", loads))


@pytest.mark.parametrize("code", ["a hook", "a loader"])
def test_what_code_between_two_jobs_changes_is_restored(code: str) -> None:
    with (
        executors.launched(moves, model_cache=model_cache.ModelCache) as launcher,
        executors.forked(launcher) as worker,
    ):
        job = worker.send_node("where")
        before = json.loads(worker.outcome(job).result)
        if code == "a hook":
            worker.executors.expect_announcement(worker.place)
            worker.executors.announce(worker.place, job.key, b'{"job": {}, "run": {}}')
        else:
            assert worker.executors.change_model({"model": "m", "idle_only": False})
        worker.until(lambda: worker.place.usable)
        assert json.loads(worker.node("where").result) == before
        assert before != {"folder": "/"}


def test_an_answer_that_no_message_can_carry_fails_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constants.put(monkeypatch, "run.wire.MAX_BYTES", 100_000)
    with executors.launched(hooked) as launcher, executors.forked(launcher) as worker:
        rows = {"job": {"id": "j"}, "run": {"name": "x" * 200_000}}
        worker.answers = {"context": {"whole": 8}, "rows": rows}
        outcome = worker.node("echo", {"x": 1}, input_template={"x": {"$from": "a"}})
        assert outcome.kind == "failed"
        assert "bytes as JSON, more than 100000" in outcome.error


# Cost.


COST = """
from tests.support import executor_app, executors
from pathlib import Path
import sys, time
took, private = [], []
with executors.launched(executor_app.load) as launcher:
    for _ in range(5):
        started = time.monotonic()
        with executors.forked(launcher) as worker:
            worker.task("add", {"a": 1, "b": 1})
            took.append(time.monotonic() - started)
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
            private.append(sum(int(x.split()[1]) for x in lines if x.startswith("Private_")))
print(min(took), max(private) / 1024)
"""


def test_an_executor_is_ready_in_an_instant_and_shares_the_app() -> None:
    """In a process without the rest of the suite, whose pages a garbage collection would copy.

    The best of several: the promise is about the work to do, not about a loaded machine.
    """
    done = subprocess.run(
        [sys.executable, "-c", COST], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    took_s, private_mb = map(float, done.stdout.split())
    assert took_s <= patience(0.3)
    assert private_mb <= 15


# Requests.


@pytest.fixture
def unheard() -> Generator[executors.Worker]:
    """An executor whose launcher is stopped, and has as many requests to read as fit."""
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        os.kill(launcher.launcher.pid, signal.SIGSTOP)
        until(lambda: state(launcher.launcher.pid) == "T")
        try:
            while launcher.launcher.kill(0, 0):  # no executor has this pid
                continue
            yield worker
        finally:
            os.kill(launcher.launcher.pid, signal.SIGCONT)


def test_a_job_goes_back_if_the_launcher_takes_no_request_for_an_executor(
    unheard: executors.Worker,
) -> None:
    """Nobody would ever hear of the executor, and the job would hold its claim for ever."""
    unheard.send_task("until_cancelled")
    job = executors.Job(executors.task_row("add", {"a": 1, "b": 1}), in_run=False)
    unheard.executors.start(job)
    assert job.death is not None
    assert [*unheard.executors] == [unheard.place]


def test_a_signal_that_the_launcher_does_not_take_is_sent_again(unheard: executors.Worker) -> None:
    unheard.kill()
    os.kill(unheard.launched.launcher.pid, signal.SIGCONT)
    assert unheard.death()["signal"] == signal.SIGKILL


# Deaths.


def test_every_death_is_reported_once() -> None:
    with executors.launched(executor_app.load) as launcher, contextlib.ExitStack() as stack:
        found = [stack.enter_context(executors.forked(launcher)) for _ in range(5)]
        for each in found:
            each.kill()
        for each in found:
            each.death()
        died = [each for each in launcher.packets if "died" in each]
        assert sorted(each["died"] for each in died) == sorted(each.pid for each in found)
        how = {(each["code"], each["signal"], each["by_deadline"]) for each in died}
        assert how == {(None, 9, False)}


def test_an_executor_whose_worker_closes_it_ends() -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        worker.place.channel.shutdown(socket.SHUT_WR)
        assert worker.death()["code"] == constants.value("run.wire.LOST")


def test_a_launcher_that_is_killed_takes_its_executors_along() -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        worker.send_task("holds_gil", {"s": 3600})
        os.kill(launcher.launcher.pid, signal.SIGKILL)
        worker.until(lambda: launcher.lost)
        assert launcher.lost is not None
        assert (launcher.lost.signum, launcher.lost.by_deadline) == (signal.SIGKILL, False)
        assert "killed by SIGKILL" in str(launcher.lost)
        until(lambda: not alive(worker.pid))


def test_a_job_whose_executor_was_not_forked_yet_is_not_charged_for_its_launcher() -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        runs = worker.send_task("until_cancelled")
        worker.until(lambda: len(runs.reports) == 2)
        os.kill(launcher.launcher.pid, signal.SIGSTOP)
        until(lambda: state(launcher.launcher.pid) == "T")
        waits = executors.Job(executors.task_row("add", {"a": 1, "b": 1}), in_run=False)
        worker.executors.start(waits)
        os.kill(launcher.launcher.pid, signal.SIGKILL)
        worker.until(lambda: launcher.lost)
        assert launcher.lost is not None
        worker.executors.lose(launcher.lost)
    assert runs.death is not None
    assert waits.death is not None
    assert (runs.death.killed_for, waits.death.killed_for) == ("", "its executor could not start")
    assert "other_jobs" not in runs.death.detail


def test_a_launcher_that_was_reaped_is_not_killed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be that of another process by now."""
    killed: list[int] = []
    with executors.launched(executor_app.load) as launcher:
        os.kill(launcher.launcher.pid, signal.SIGKILL)
        until(lambda: launcher.turn(0.05) or launcher.lost)
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, _: killed.append(pid))
            launcher.launcher.close()
    assert not killed


def test_a_launcher_that_was_stopped_until_its_deadline_was_killed_by_no_handler() -> None:
    """The kernel does it, although the worker has moved the deadline in time."""
    with executors.launched(executor_app.load) as launcher:
        launcher.launcher.hold(clocks.boot_s() + 5.0)
        with executors.forked(launcher) as worker:  # so that it has received the deadline
            os.kill(launcher.launcher.pid, signal.SIGSTOP)
            launcher.launcher.hold(clocks.boot_s() + 3600)
            worker.until(lambda: launcher.lost)
            assert launcher.lost is not None
            assert (launcher.lost.signum, launcher.lost.by_deadline) == (signal.SIGKILL, True)


def test_a_deadline_kills_the_executors_and_not_the_launcher() -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        worker.send_task("holds_gil", {"s": 3600})
        launcher.launcher.hold(clocks.boot_s() + 0.2)
        died = worker.death()
        assert (died["signal"], died["by_deadline"]) == (9, True)
        with executors.forked(launcher) as another:
            assert another.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_a_deadline_that_is_moved_or_taken_away_kills_nobody() -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        until_s = clocks.boot_s() + 0.3
        while clocks.boot_s() < until_s:
            launcher.launcher.hold(clocks.boot_s() + 60)
            worker.task("add", {"a": 1, "b": 1})
        launcher.launcher.hold(clocks.boot_s() + 0.5)
        launcher.launcher.hold(None)
        ends = clocks.boot_s() + 1.0
        while clocks.boot_s() < ends:
            assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


# The worker as a process of its own.


class WorkerProcess:
    """A worker with executors, each of which runs a handler for ever."""

    def __init__(self, task: str, *, count: int = 2, lease_s: float = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.executor_worker", str(count), task, str(lease_s)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.pids: dict[str, Any] = json.loads(self.process.stdout.readline())

    @property
    def everyone(self) -> list[int]:
        return [self.process.pid, self.pids["launcher"], *self.pids["executors"]]

    def lines(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        for pid in self.everyone[1:]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def started() -> Generator[Callable[..., WorkerProcess]]:
    found: list[WorkerProcess] = []

    def start(*args: Any, **keywords: Any) -> WorkerProcess:
        found.append(WorkerProcess(*args, **keywords))
        return found[-1]

    yield start
    for each in found:
        each.close()


@pytest.mark.parametrize("task", ["endless", "holds_gil", "ignores_sigterm", "evil_regex"])
def test_no_process_outlives_a_worker_that_is_killed(
    started: Callable[..., WorkerProcess], task: str
) -> None:
    worker = started(task)
    worker.process.kill()
    worker.process.wait()
    until(lambda: not any(map(alive, worker.everyone)))


@pytest.mark.parametrize("task", ["endless", "holds_gil"])
def test_the_executors_of_a_stopped_worker_end_at_the_deadline(
    started: Callable[..., WorkerProcess], task: str
) -> None:
    worker = started(task, lease_s=1.0)
    os.kill(worker.process.pid, signal.SIGSTOP)
    until(lambda: not any(map(alive, worker.pids["executors"])))
    assert alive(worker.pids["launcher"])
    os.kill(worker.process.pid, signal.SIGCONT)
    assert {worker.lines()["by_deadline"] for _ in range(2)} == {True}


def test_stopped_executors_end_at_the_deadline_while_all_others_are_stopped_too(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started("endless", lease_s=1.0)
    for pid in worker.everyone:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: not any(map(alive, worker.everyone[1:])))
    assert state(worker.process.pid) == "T"


def test_executors_of_a_living_worker_live_longer_than_one_lease(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started("holds_gil", lease_s=1.0)
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        assert all(map(alive, worker.everyone))
        threading.Event().wait(0.05)


def test_sigterm_to_every_process_ends_the_worker_alone_by_its_own_decision(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started("endless")
    for pid in worker.everyone[1:]:
        os.kill(pid, signal.SIGTERM)
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        assert all(map(alive, worker.everyone))
        threading.Event().wait(0.05)
    os.kill(worker.process.pid, signal.SIGTERM)
    until(lambda: not any(map(alive, worker.everyone)))
