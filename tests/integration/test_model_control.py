"""Models on a live worker: swaps, failures, idle unload, and requests to load or unload."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    config,
    db,
    errors,
    model_cache,
    model_registry,
    node_queue,
    run_store,
    worker_control,
    workers,
)
from queue_workflows import models as models_api
from queue_workflows.worker import gpu_models
from tests.support import console, constants, factories, flow, wait
from tests.support.commands import Commands
from tests.support.worker_views import node_row

Row = dict[str, Any]


class Models:
    """Models whose loads and unloads are recorded, and delayed or failed on request."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate: dict[str, threading.Event] = {}

    def add(self, *names: str, **more: Any) -> None:
        for name in names:
            self._add(name, **more)

    def _add(
        self, name: str, *, error: BaseException | None = None, held_up: bool = False, gb: float = 0
    ) -> None:
        if held_up:
            self.gate[name] = threading.Event()

        def load() -> str:
            self.log.append(f"load {name}")
            if held_up:
                assert self.gate[name].wait(30)
            if error is not None:
                raise error
            return f"handle of {name}"

        def unload(_: Any) -> None:
            self.log.append(f"unload {name}")

        model_registry.register(model_registry.ModelSpec(name, load, unload, gb))


@pytest.fixture
def models(db: ModuleType) -> Iterator[Models]:
    model_registry.clear_for_tests()
    made = Models()
    yield made
    model_registry.clear_for_tests()


class Gpu:
    """A gpu worker at work in this process, which notes the code with which it would leave."""

    def __init__(self, **more: Any) -> None:
        self.exits: list[int] = []
        self.cache = model_cache.ModelCache()
        self.worker = claim_worker.ClaimWorker(
            queue="gpu",
            host="box",
            model_cache=self.cache,
            on_exit=self.exits.append,
            **more,
        )
        self._thread = threading.Thread(target=self.worker.run_forever, name="test-worker")

    def __enter__(self) -> Gpu:
        self._thread.start()
        wait.until(lambda: self.row() is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def row(self) -> Row | None:
        """What it is shown to hold."""
        rows = models_api.list("box")
        return next((row for row in rows if row["worker_id"] == self.worker.worker_id), None)

    def answer(self, request: Row) -> Row:
        """Its answer to a request, once it is over."""

        def over() -> Row | None:
            said = (self.row() or {}).get("request")
            return said if said and said["no"] >= request["request_no"] and _is_over(said) else None

        return wait.until(over)


def _is_over(said: Row) -> bool:
    return said["state"] in ("done", "failed", "refused")


@pytest.fixture
def gpu(models: Models) -> Iterator[Callable[..., Gpu]]:
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(Gpu(**more))
        for gate in models.gate.values():
            gate.set()


@contextmanager
def held_body(name: str = "held") -> Generator[tuple[threading.Event, threading.Event]]:
    """A node handler that reports when it runs and waits until it is released."""
    started, go_on = threading.Event(), threading.Event()

    def body() -> None:
        started.set()
        assert go_on.wait(30)

    queue_workflows.register_node(name, body)
    try:
        yield started, go_on
    finally:
        go_on.set()


def queued(node: str = "ok", model: str | None = None) -> str:
    run = run_store.insert_run(workflow_name="w", status="running")
    return node_queue.enqueue_node_job(
        run_id=run["id"], node_id="n", node_module=node, queue="gpu", required_model=model
    )


def is_over(job_id: str) -> Callable[[], bool]:
    return lambda: node_row(job_id)["status"] in ("completed", "failed")


def advertised(conn: Any) -> Any:
    return factories.one(conn, "SELECT current_model FROM worker_heartbeats")


# --- the warm cache of a worker at work


def test_nothing_is_advertised_during_a_swap(
    models: Models, gpu: Any, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "3600")
    models.add("a", gb=2.5)
    models.add("b", held_up=True)
    queue_workflows.register_node("ok", flow.nothing)
    gpu()
    queued(model="a")
    wait.until(lambda: advertised(conn) == "a")
    swapped = queued(model="b")
    wait.until(lambda: models.log[-1] == "load b")
    wait.until(lambda: advertised(conn) is None)
    (row,) = models_api.list()
    assert (row["model"], row["loading"], row["since"]) == ("b", True, None)
    models.gate["b"].set()
    wait.until(is_over(swapped))
    wait.until(lambda: advertised(conn) == "b")
    assert models.log == ["load a", "unload a", "load b"]


@pytest.mark.parametrize("error", [RuntimeError("a broken file"), SystemExit(3)])
def test_a_load_that_fails_fails_its_job_and_the_worker_goes_on(
    models: Models, gpu: Any, error: BaseException
) -> None:
    models.add("bad", error=error)
    models.add("good")
    queue_workflows.register_node("ok", flow.nothing)
    subject = gpu()
    failed, fine = queued(model="bad"), queued(model="good")
    wait.until(is_over(fine))
    wait.until(is_over(failed))
    assert (node_row(failed)["status"], node_row(fine)["status"]) == ("failed", "completed")
    assert str(error) in node_row(failed)["error"]
    assert subject.exits == []


def test_an_idle_model_goes_after_its_ttl_and_never_under_a_job(
    models: Models, gpu: Any, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.gpu_models.REAP_S", 0.05)
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "0.001")
    models.add("a")
    with held_body() as (started, go_on):
        subject = gpu()
        running = queued("held", model="a")
        assert started.wait(30)
        # The TTL passes many times over.
        assert not any(subject.cache.reap_idle_once() for _ in range(1000))
        assert models.log == ["load a"]
        go_on.set()
        wait.until(is_over(running))
        wait.until(lambda: models.log == ["load a", "unload a"])
        wait.until(lambda: advertised(conn) is None)


def test_a_slow_idle_unload_does_not_block_the_lease_keeper(
    models: Models, gpu: Any, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.gpu_models.REAP_S", 0.05)
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "0.1")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "0.05")
    unloading, go_on = threading.Event(), threading.Event()

    def unload(_: Any) -> None:
        unloading.set()
        assert go_on.wait(30)

    model_registry.register(model_registry.ModelSpec("a", dict, unload))
    gpu()
    try:
        models_api.load("box", "a")
        assert unloading.wait(30)
        seen = factories.one(conn, "SELECT last_seen FROM workers")
        wait.until(lambda: factories.one(conn, "SELECT last_seen FROM workers") > seen)
        wait.until(lambda: advertised(conn) is None)
    finally:
        go_on.set()


def test_the_registrar_runs_once_more_where_nothing_is_registered(models: Models, gpu: Any) -> None:
    calls: list[int] = []

    def register() -> None:
        calls.append(1)
        models.add("late")

    config.set_builtin_model_registrar(register)
    queue_workflows.register_node("ok", flow.nothing)
    gpu()
    late = queued(model="late")
    wait.until(is_over(late))
    assert (node_row(late)["status"], calls) == ("completed", [1])


# --- on request


def test_a_model_is_loaded_on_request_and_shown_with_its_times(models: Models, gpu: Any) -> None:
    models.add("a", gb=2.5)
    subject = gpu()
    request = models_api.load("box", "a", by="me")
    said = subject.answer(request)
    assert (said["state"], said["action"], said["model"]) == ("done", "load", "a")
    assert (said["requested_by"], said["error"]) == ("me", None)
    row = subject.row()
    assert (row["model"], row["loading"], row["est_vram_gb"]) == ("a", False, 2.5)
    assert 0 <= row["load_s"] <= said["seconds"] < 20
    assert 0 <= row["held_s"] < 20
    assert row["since"] <= row["last_seen"]
    assert (row["pid"] or 0) > 0
    assert row["known_models"] == ["a"]


def test_the_fleet_learns_from_a_load_on_request_and_not_from_a_warm_model(
    models: Models, gpu: Any, conn: Any
) -> None:
    models.add("a")
    subject = gpu()

    def loads() -> list[int]:
        return [row["loads"] for row in conn.execute("SELECT loads FROM gpu_models")]

    subject.answer(models_api.load("box", "a"))
    wait.until(lambda: loads() == [1])
    subject.answer(models_api.load("box", "a"))
    subject.answer(models_api.unload("box"))
    assert loads() == [1]


def test_it_is_obeyed_between_jobs_before_the_next_one(models: Models, gpu: Any) -> None:
    models.add("b")
    queue_workflows.register_node("next", lambda: models.log.append("next job"))
    with held_body() as (started, go_on):
        subject = gpu()
        running = queued("held")
        assert started.wait(30)
        after = queued("next")
        request = models_api.load("box", "b")
        wait.until(lambda: (subject.row()["request"] or {}).get("state") == "waiting")
        assert models.log == []
        go_on.set()
        subject.answer(request)
        wait.until(is_over(after))
    assert models.log == ["load b", "next job"]
    assert node_row(running)["status"] == node_row(after)["status"] == "completed"


def test_a_newer_request_takes_the_place_of_one_that_waits(models: Models, gpu: Any) -> None:
    models.add("a", "b")
    with held_body() as (started, go_on):
        subject = gpu()
        queued("held")
        assert started.wait(30)
        models_api.load("box", "a")
        wait.until(lambda: (subject.row()["request"] or {}).get("model") == "a")
        newer = models_api.load("box", "b")
        wait.until(lambda: subject.row()["request"]["model"] == "b")
        go_on.set()
        assert subject.answer(newer)["state"] == "done"
    assert models.log == ["load b"]


@pytest.mark.parametrize(("named", "left"), [("a", None), (None, None), ("b", "a")])
def test_only_the_loaded_model_is_unloaded_on_request(
    models: Models, gpu: Any, named: str | None, left: str | None
) -> None:
    models.add("a", "b")
    subject = gpu()
    subject.answer(models_api.load("box", "a"))
    assert subject.answer(models_api.unload("box", named))["state"] == "done"
    assert subject.row()["model"] == left
    assert models.log == ["load a"] + ([] if left else ["unload a"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("24 GB short"), "MemoryError: 24 GB short"),
        (SystemExit("no weights"), "SystemExit: no weights"),
        (OSError("a\0b password=hunter2"), "OSError: a\N{REPLACEMENT CHARACTER}b password=***"),
    ],
)
def test_a_load_on_request_that_fails_reports_why_and_the_worker_continues(
    models: Models, gpu: Any, error: BaseException, reason: str
) -> None:
    models.add("bad", error=error)
    models.add("good")
    queue_workflows.register_node("ok", flow.nothing)
    subject = gpu()
    said = subject.answer(models_api.load("box", "bad"))
    assert said["state"] == "failed"
    assert reason in said["error"]
    fine = queued(model="good")
    wait.until(is_over(fine))
    assert node_row(fine)["status"] == "completed"


def test_a_worker_that_is_off_loads_nothing_but_unloads(models: Models, gpu: Any) -> None:
    models.add("a")
    subject = gpu()
    subject.answer(models_api.load("box", "a"))
    workers.disable("box", "gpu", stop_policy="pause")
    refused = subject.answer(models_api.load("box", "a"))
    assert (refused["state"], refused["error"]) == ("refused", "the worker is OFF by policy pause")
    assert subject.answer(models_api.unload("box"))["state"] == "done"
    assert models.log == ["load a", "unload a"]


def test_a_paused_worker_keeps_its_model(
    models: Models, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.gpu_models.REAP_S", 0.05)
    looks: list[int] = []
    reap = gpu_models.GpuModels._reap

    def counted(self: gpu_models.GpuModels) -> None:
        looks.append(1)
        reap(self)

    monkeypatch.setattr(gpu_models.GpuModels, "_reap", counted)
    models.add("a")
    subject = gpu()
    subject.answer(models_api.load("box", "a"))
    workers.disable("box", "gpu", stop_policy="pause")
    wait.until(lambda: [row["state"] for row in workers.list()] == ["paused"])
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "0.001")
    before = len(looks)
    wait.until(lambda: len(looks) > before + 10)
    assert models.log == ["load a"]


def test_off_hard_ends_a_worker_in_the_middle_of_a_load(models: Models, gpu: Any) -> None:
    models.add("a", held_up=True)
    subject = gpu()
    models_api.load("box", "a")
    wait.until(lambda: subject.cache.loading_model == "a")
    workers.disable("box", "gpu")
    wait.until(lambda: worker_control.EXIT_CONTROL_HARD_STOP in subject.exits)


def test_a_worker_that_stops_gives_a_load_its_shutdown_time_and_leaves(
    models: Models, gpu: Any
) -> None:
    models.add("a", held_up=True)
    subject = gpu(shutdown_timeout_s=0.1)
    models_api.load("box", "a")
    wait.until(lambda: subject.cache.loading_model == "a")
    assert subject.exits == []
    subject.worker.stop()
    wait.until(lambda: 0 in subject.exits)


def test_a_request_to_an_earlier_process_is_ignored_by_this_one(
    models: Models, gpu: Any, conn: Any
) -> None:
    models.add("a", "b")
    conn.execute(
        "INSERT INTO model_controls (host_label, action, model) VALUES ('box', 'load', 'a')"
    )
    subject = gpu()
    subject.answer(models_api.load("box", "b"))
    assert models.log == ["load b"]


def test_a_request_can_name_one_of_two_workers_of_a_machine(models: Models, gpu: Any) -> None:
    models.add("a", "b")
    one, other = gpu(), gpu()
    request = models_api.load("box", "a", worker_id=one.worker.worker_id)
    one.answer(request)
    both = models_api.load("box", "b")
    one.answer(both)
    other.answer(both)
    assert sorted(models.log) == ["load a", "load b", "load b", "unload a"]


def test_a_plain_write_is_a_request_and_every_write_is_a_new_one(
    models: Models, gpu: Any, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "3600")
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "3600")
    models.add("a")
    gpu()
    conn.execute(
        "INSERT INTO model_controls (host_label, action, model) VALUES ('box', 'load', 'a')"
    )
    wait.until(lambda: models.log == ["load a"])
    conn.execute("UPDATE model_controls SET action = 'unload', model = NULL")
    wait.until(lambda: models.log == ["load a", "unload a"])
    conn.execute("UPDATE model_controls SET action = 'load', model = 'a'")
    wait.until(lambda: models.log == ["load a", "unload a", "load a"])


def test_a_plain_write_of_any_size_keeps_no_worker_from_reporting(
    models: Models, gpu: Any, conn: Any
) -> None:
    subject = gpu()
    conn.execute(
        "INSERT INTO model_controls (host_label, action, model, requested_by)"
        " VALUES ('box', 'load', repeat('x', 3000000), repeat('y', 3000000))"
    )
    said = subject.answer({"request_no": 1})
    assert said["state"] == "failed"
    assert "unknown model 'xxx" in said["error"]
    assert (len(said["model"]), len(said["requested_by"])) == (400, 400)


def test_it_is_seen_without_notifications(
    models: Models, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.05")
    models.add("a")
    gpu()
    models_api.load("box", "a")
    wait.until(lambda: models.log == ["load a"])


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"host": "nowhere"}, errors.UnknownWorker, "'nowhere' has no live gpu worker"),
        ({"worker_id": "w9"}, errors.UnknownWorker, "has no gpu worker 'w9' but w1"),
        ({"model": "nope"}, errors.UnknownModel, "does not know model 'nope'; it knows a, b"),
        ({"host": "box1"}, errors.UnknownWorker, "hosts with one: box; did you mean 'box'?"),
        ({"model": "a\x00"}, errors.InvalidConfig, "model 'a\\\\x00'"),
        ({"host": ""}, errors.InvalidConfig, "host ''"),
        ({"worker_id": "\udc80"}, errors.InvalidConfig, "worker"),
        ({"by": "\udc80"}, errors.InvalidConfig, "by"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_write(
    conn: Any, change: Row, error: type[Exception], reason: str
) -> None:
    known(conn)
    asked = {"host": "box", "model": "a"} | change
    with pytest.raises(error, match=reason):
        models_api.load(**asked)
    assert factories.one(conn, "SELECT count(*) FROM model_controls") == 0


def known(conn: Any, *, age_s: float = 0) -> None:
    """A gpu worker of host `box` that knows the models a and b, as it reported `age_s` ago."""
    factories.insert(conn, "workers", worker_id="w1", host_label="box", queue="gpu", pid=7)
    factories.insert(
        conn, "worker_heartbeats", host_label="box", queue="gpu", known_models=["b", "a"]
    )
    conn.execute("UPDATE workers SET last_seen = now() - %s * interval '1 second'", (age_s,))


def test_a_dead_worker_gets_no_request_and_has_no_model(conn: Any) -> None:
    known(conn, age_s=95)
    conn.execute("""UPDATE workers SET detail = '{"model": {"id": "a", "held_s": 3}}'""")
    with pytest.raises(errors.UnknownWorker, match="hosts with one: none"):
        models_api.load("box", "a")
    (row,) = models_api.list()
    assert (row["state"], row["model"], row["held_s"]) == ("dead", None, None)


def test_a_model_without_a_name_is_not_listed(conn: Any) -> None:
    known(conn)
    conn.execute("UPDATE worker_heartbeats SET known_models = ARRAY['b', NULL, 'a']")
    (row,) = models_api.list()
    assert row["known_models"] == ["a", "b"]


def test_a_request_joins_the_callers_transaction(conn: Any) -> None:
    known(conn)
    with db.connection() as mine:
        models_api.load("box", "a", conn=mine)
        mine.rollback()
    assert factories.one(conn, "SELECT count(*) FROM model_controls") == 0


def test_the_table_refuses_requests_that_no_worker_could_carry_out(conn: Any) -> None:
    for columns in ("'load', NULL", "'dance', 'a'"):
        with pytest.raises(db.Error, match="model_controls_"):
            conn.execute(
                f"INSERT INTO model_controls (host_label, action, model) VALUES ('box', {columns})"
            )


# --- the command


def test_the_command_loads_lists_and_unloads(models: Models, gpu: Any) -> None:
    models.add("a", gb=2.5)
    subject = gpu()
    pid = str(subject.row()["pid"])
    code, out, _ = console.command("models", "load", "a", "--host", "box", "--by", "me")
    assert code == 0
    assert out.startswith(f"box pid {pid} holds a, after ")
    code, out, _ = console.command("models")
    assert code == 0
    head, line = out.splitlines()
    assert head.split() == [
        "host", "pid", "state", "model", "held", "load", "needs", "gpus", "request",
    ]  # fmt: skip
    assert line.split()[:4] == ["box", pid, "idle", "a"]
    assert "2.5 GB" in line
    assert line.endswith("load a by me done")
    code, out, _ = console.command("models", "unload", "--host", "box", "--worker", pid)
    assert (code, out.startswith(f"box pid {pid} holds no model, after ")) == (0, True)
    code, out, _ = console.command("models", "list", "--host", "box", "--json")
    (row,) = json.loads(out)
    assert (row["model"], row["request"]["state"]) == (None, "done")


def test_the_command_prints_what_it_waits_for_and_what_failed(
    models: Models, gpu: Any, cli: Commands
) -> None:
    models.add("bad", error=MemoryError("24 GB short"))
    with held_body() as (started, go_on):
        subject = gpu()
        running = queued("held")
        assert started.wait(30)
        command = cli.start("queue-workflows", "models", "load", "bad", "--host", "box")
        said = f"box pid {subject.row()['pid']} obeys after job {running}\n"
        wait.until(lambda: command.err.endswith(said))
        wait.until(lambda: (subject.row()["request"] or {}).get("state") == "waiting")
        go_on.set()
        assert command.wait() == 1
    assert command.err.count("obeys") == 1
    reason = "failed: loading model 'bad' failed: MemoryError: 24 GB short"
    assert command.out.rstrip().endswith(reason)


def test_the_command_does_not_wait_with_no_wait(conn: Any) -> None:
    known(conn)
    code, out, _ = console.command("models", "load", "a", "--host", "box", "--no-wait", "--json")
    assert (code, json.loads(out)[0]["worker_id"]) == (0, "w1")
    row = conn.execute("SELECT * FROM model_controls").fetchone()
    assert (row["host_label"], row["worker_id"], row["action"], row["model"]) == (
        "box",
        "",
        "load",
        "a",
    )


def test_the_command_gives_up_on_a_worker_that_died(conn: Any, cli: Commands) -> None:
    known(conn)
    conn.execute("UPDATE workers SET job_ids = '{j}'")
    command = cli.start("queue-workflows", "models", "load", "a", "--host", "box")
    wait.until(lambda: "obeys after job j" in command.err)
    conn.execute("UPDATE workers SET state = 'dead'")
    assert (command.wait(), command.out) == (1, "box pid 7 failed: the worker is dead\n")


def test_a_worker_that_dies_with_the_commit_of_the_request_has_not_obeyed(conn: Any) -> None:
    known(conn)
    conn.execute(
        "CREATE FUNCTION gone() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN UPDATE workers SET state = 'dead'; RETURN NULL; END$$;"
        " CREATE CONSTRAINT TRIGGER gone AFTER INSERT ON model_controls"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION gone()"
    )
    try:
        done = console.command("models", "load", "a", "--host", "box")
    finally:
        conn.execute("DROP FUNCTION gone() CASCADE")
    assert done == (1, "box pid 7 failed: the worker is dead\n", "")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("load", "a", "--host", "nowhere"), "host 'nowhere' has no live gpu worker"),
        (("load", "nope", "--host", "box"), "host 'box' does not know model 'nope'"),
        (("load", "a", "--host", "box", "--worker", "99"), "has no gpu worker '99'"),
        (("load", "--host", "box"), "load needs the id of a model"),
        (("list", "a"), "unexpected extra argument(s) (a)"),
        (("list", "--host", "\udcff"), "host '\\udcff'"),
    ],
)
def test_what_the_command_cannot_do_is_a_line_and_exit_code_2(
    conn: Any, argv: tuple[str, ...], reason: str
) -> None:
    known(conn)
    code, out, err = console.command("models", *argv)
    assert (code, out) == (2, "")
    assert reason in err
    assert len(err.splitlines()) == 1


def test_no_gpu_worker_is_an_empty_list(db: ModuleType) -> None:
    code, out, _ = console.command("models")
    assert (code, len(out.splitlines())) == (0, 1)
