"""One node: its arguments, its body and brackets, its result, and how each end is recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

import pytest

import queue_workflows
from queue_workflows import (
    config,
    model_cache,
    model_registry,
    node_executor,
    node_queue,
    run_store,
)
from queue_workflows import (
    db as database,
)
from tests.support import factories

Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("db")


@pytest.fixture
def cache() -> Generator[model_cache.ModelCache]:
    made = model_cache.ModelCache()
    yield made
    made.drop_cache()
    model_registry.clear_for_tests()


def nothing() -> Row:
    return {}


def claimed(body: Any = None, *, node_id: str = "n", run: Row | None = None, **columns: Any) -> Row:
    """A claimed job of this body, in a new run of these columns."""
    if body is not None:
        queue_workflows.register_node("body", body)
    model = columns.pop("required_model", None)
    with database.connection() as conn:
        run_id = factories.run(conn, **(run or {}))
        given = {"node_module": "body", "queue": "gpu" if model else "cpu", "required_model": model}
        factories.node(conn, run_id, node_id, **given | columns)
    job = node_queue.claim_next_gpu_job() if model else node_queue.claim_next_cpu_job()
    assert job is not None
    return job


def now(job: Row) -> Row:
    row = node_queue.get_node_job(job["id"])
    assert row is not None
    return row


def state(job: Row) -> str:
    return now(job)["status"]


def ran(body: Any, **columns: Any) -> Row:
    """The row of a job whose body ran; it completed."""
    job = claimed(body, **columns)
    assert node_executor.execute_node(job) == "completed", now(job)["error"]
    return now(job)


def broke(body: Any, **columns: Any) -> str:
    """The error of a job whose body failed; nobody holds it any longer."""
    job = claimed(body, **columns)
    assert node_executor.execute_node(job) == "failed"
    row = now(job)
    assert (row["status"], row["worker_id"], row["lease_expires_at"]) == ("failed", None, None)
    return row["error"]


def events(job: Row) -> list[str]:
    with database.connection() as conn:
        return factories.column(
            conn,
            "SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id",
            job["id"],
        )


class Got:
    """Keyword arguments as a body received them."""

    def __init__(self) -> None:
        self.values: Row = {}

    def keep(self, **values: Any) -> Row:
        self.values = values
        return {}


# --- arguments ---------------------------------------------------------------------------------


def test_inputs_are_bound_by_name_and_the_others_are_left_out() -> None:
    row = ran(lambda a, b: {"sum": a + b}, inputs={"b": 2, "a": 40, "unasked": 1})
    assert row["context_delta"] == {"sum": 42}


def test_none_leaves_a_parameter_to_its_default() -> None:
    assert ran(lambda a=7: {"a": a}, inputs={"a": None})["context_delta"] == {"a": 7}


def test_none_reaches_a_parameter_without_a_default() -> None:
    assert ran(lambda a: {"a": a}, inputs={"a": None})["context_delta"] == {"a": None}


@pytest.mark.parametrize(
    "annotation",
    [
        Path,
        Path | None,
        Optional[Path],  # noqa: UP045
        Union[str, Path],  # noqa: UP007
        "Path",
        "Path | None",
        "Optional[Path]",
        "OnlyForTypeCheckers | Path",
    ],
    ids=str,
)
def test_text_becomes_a_path_where_a_path_is_asked_for(annotation: Any) -> None:
    got = Got()

    def body(where: Any) -> Row:
        return got.keep(where=where)

    body.__annotations__ = {"where": annotation}
    ran(body, inputs={"where": "/a/b"})
    assert got.values == {"where": Path("/a/b")}
    assert isinstance(got.values["where"], Path)


@pytest.mark.parametrize("annotation", [str, "str", "list[Path]", "dict[str, Path]"], ids=str)
def test_text_stays_text_where_no_path_is_asked_for(annotation: Any) -> None:
    got = Got()

    def body(where: Any) -> Row:
        return got.keep(where=where)

    body.__annotations__ = {"where": annotation}
    ran(body, inputs={"where": "/a/b"})
    assert got.values == {"where": "/a/b"}
    assert isinstance(got.values["where"], str)


def test_a_body_with_kwargs_gets_the_rest_of_the_inputs() -> None:
    row = ran(lambda a, **rest: {"a": a, "rest": rest}, inputs={"a": 1, "b": 2, "c": None})
    assert row["context_delta"] == {"a": 1, "rest": {"b": 2, "c": None}}


def test_a_body_gets_what_the_engine_offers_by_name() -> None:
    got, cancel, heard = Got(), threading.Event(), []

    def body(
        inputs: Any,
        model_handle: Any,
        model_load_seconds: Any,
        cancel_event: Any,
        status_callback: Any,
    ) -> Row:
        status_callback(0.5)
        return got.keep(
            inputs=inputs, model=model_handle, load=model_load_seconds, cancel=cancel_event
        )

    job = claimed(body, inputs={"x": 1})
    node_executor.execute_node(job, cancel_event=cancel, status_callback=heard.append)
    assert got.values == {"inputs": {"x": 1}, "model": None, "load": 0.0, "cancel": cancel}
    assert heard == [0.5]


def test_status_callback_and_cancel_event_are_there_without_a_worker() -> None:
    def body(status_callback: Callable[..., object], cancel_event: threading.Event) -> Row:
        status_callback()
        status_callback({"a": 1})
        return {"set": cancel_event.is_set()}

    assert ran(body)["context_delta"] == {"set": False}


def test_a_missing_argument_is_named() -> None:
    assert "'needed'" in broke(lambda needed: {}, inputs={"other": 1})


# --- folders -----------------------------------------------------------------------------------


def test_out_is_the_nodes_folder_created_and_kept_for_the_next_attempt(tmp_path: Path) -> None:
    def body(out: Path) -> Row:
        before = sorted(each.name for each in out.iterdir())
        (out / "made").touch()
        if not before:
            raise OSError("first")
        return {"before": before, "out": str(out)}

    job = claimed(body, node_id="s/n", run={"out_dir": str(tmp_path)}, max_attempts=2)
    assert node_executor.execute_node(job) == "failed"
    with database.connection() as conn:
        conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
    again = node_queue.claim_next_cpu_job()
    assert again is not None
    assert node_executor.execute_node(again) == "completed"
    assert now(job)["context_delta"] == {"before": ["made"], "out": str(tmp_path / "s" / "n")}


def test_out_is_none_without_an_out_dir() -> None:
    assert ran(lambda out: {"out": out})["context_delta"] == {"out": None}


def test_no_folder_is_made_for_a_body_that_asks_for_none(tmp_path: Path) -> None:
    ran(nothing, run={"out_dir": str(tmp_path / "deep")})
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("node_id", ["../evil", "a/../../evil", "."])
def test_a_node_id_that_leads_outside_is_refused(node_id: str, tmp_path: Path) -> None:
    bodies: list[Any] = []
    error = broke(
        lambda out: bodies.append(out), node_id=node_id, run={"out_dir": str(tmp_path / "run")}
    )
    assert "outside the run's out_dir" in error
    assert repr(node_id) in error
    assert not bodies
    assert not (tmp_path / "evil").exists()


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "n").symlink_to(tmp_path)
    assert "outside" in broke(lambda out: {}, run={"out_dir": str(tmp_path / "run")})


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("has_out_dir", [False, True])
def test_scratch_is_a_folder_that_is_removed_with_what_is_in_it(
    fails: bool, has_out_dir: bool, tmp_path: Path
) -> None:
    seen: list[Path] = []

    def body(scratch: Path) -> Row:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "file").touch()
        seen.append(scratch)
        return {"x": 1 / 0} if fails else {}

    job = claimed(body, run={"out_dir": str(tmp_path) if has_out_dir else None})
    assert node_executor.execute_node(job) == ("failed" if fails else "completed")
    assert not seen[0].exists()
    assert seen[0].is_relative_to(tmp_path) is has_out_dir


# --- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "delta"),
    [
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        ({"context_delta": {"a": 1}}, {"a": 1}),
        ({"context_delta": {"a": 1}, "noise": 2}, {"a": 1}),
        ({"context_delta": None}, {}),
        (None, {}),
        (3, {}),
        ("text", {}),
        ([1, 2], {}),
    ],
)
def test_what_a_body_returns_becomes_its_delta(returned: Any, delta: Row) -> None:
    row = ran(lambda: returned)
    assert row["context_delta"] == delta
    assert row["seconds"] >= 0


def _deep() -> Row:
    value: Row = {}
    for _ in range(500):
        value = {"x": value}
    return value


def _circle() -> Row:
    value: Row = {}
    value["x"] = value
    return value


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: {"x": float("nan")}, "JSON cannot carry"),
        (lambda: {"x": float("inf")}, "JSON cannot carry"),
        (lambda: {"x": {1, 2}}, "JSON cannot carry"),
        (lambda: {"x": object()}, "JSON cannot carry"),
        (lambda: {1: "x"}, "key 1 is not a string"),
        (lambda: {"x": "a\0b"}, "NUL"),
        (lambda: {"a\0b": 1}, "NUL"),
        (lambda: {"x": "\ud800"}, "lone surrogate"),
        (_deep, "nested deeper"),
        (_circle, "nested deeper"),
        (lambda: {"x": "y" * 3000}, "MAX_PAYLOAD_KB"),
    ],
    ids=[
        "nan",
        "infinity",
        "set",
        "object",
        "key",
        "nul",
        "nul-key",
        "surrogate",
        "deep",
        "circle",
        "large",
    ],
)
def test_a_result_that_cannot_be_stored_fails_the_node_and_says_why(
    make: Callable[[], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "2")
    error = broke(make)
    assert reason in error
    assert "result of node 'n'" in error


# --- failures ----------------------------------------------------------------------------------


def _raise(error: BaseException) -> Callable[[], Row]:
    def body() -> Row:
        raise error

    return body


def test_an_error_is_stored_with_its_type_and_its_traceback() -> None:
    job = claimed(_raise(RuntimeError("it broke")))
    assert node_executor.execute_node(job) == "failed"
    assert now(job)["error"] == "RuntimeError: it broke"
    with database.connection() as conn:
        detail = factories.one(
            conn, "SELECT detail FROM workflow_node_events WHERE event_type = 'failed'"
        )
    assert "in body" in detail["traceback"]


def test_an_error_text_with_nul_is_stored_without_it() -> None:
    assert broke(_raise(ValueError("a\0b\ud800c"))) == "ValueError: a\ufffdb\ufffdc"


def test_an_error_text_is_cut() -> None:
    assert len(broke(_raise(ValueError("x" * 20_000)))) == 8000


def test_an_error_that_cannot_be_printed_is_stored() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "cannot be printed" in broke(_raise(Mute()))


def test_sys_exit_in_a_body_fails_its_node() -> None:
    assert "sys.exit(3)" in broke(lambda: sys.exit(3))


def test_a_body_that_was_told_to_end_leaves_a_cancelled_job() -> None:
    cancel = threading.Event()

    def body(cancel_event: threading.Event) -> Row:
        run_store.update_run(job["run_id"], status="cancelled")
        cancel_event.set()
        return {"late": True}

    job = claimed(body)
    assert node_executor.execute_node(job, cancel_event=cancel) == "skipped"
    assert (state(job), now(job)["context_delta"]) == ("cancelled", {})


def test_an_error_after_the_cancel_is_not_a_failure() -> None:
    cancel = threading.Event()

    def body() -> Row:
        run_store.update_run(job["run_id"], status="cancelled")
        cancel.set()
        raise RuntimeError("told to end")

    job = claimed(body)
    assert node_executor.execute_node(job, cancel_event=cancel) == "skipped"
    assert (state(job), now(job)["error"]) == ("cancelled", None)


@pytest.mark.parametrize("body", [lambda: {"late": 1}, _raise(RuntimeError("late"))])
def test_a_lost_claim_writes_nothing(body: Any) -> None:
    job = claimed(body)
    with database.connection() as conn:
        factories.expire(conn, job)
    node_queue.reclaim_expired_leases()
    newer = node_queue.claim_next_cpu_job()
    assert newer is not None
    before = now(job)
    assert node_executor.execute_node(job) == "skipped"
    assert now(job) == before
    assert before["claim_no"] == job["claim_no"] + 1


def test_an_unknown_node_module_fails_the_node_and_says_what_to_do() -> None:
    error = broke(None, node_module="os.path")
    assert "'os.path' is not registered" in error
    assert "register_node" in error


def test_a_module_without_run_fails_the_node() -> None:
    config.set_node_resolver(lambda name: ModuleType(name))
    assert "'bare' has no run()" in broke(None, node_module="bare")


def test_an_input_node_parks_and_imports_nothing() -> None:
    def resolver(name: str) -> Any:
        raise AssertionError(f"{name} was looked up")

    config.set_node_resolver(resolver)
    job = claimed(None, node_module="__input__no_such_module")
    assert node_executor.execute_node(job) == "completed"
    assert (state(job), now(job)["lease_expires_at"]) == ("awaiting_input", None)
    kinds = [each["kind"] for each in node_queue.list_unprocessed_dispatch_events()]
    assert kinds == ["awaiting_input"]


# --- the host's hooks --------------------------------------------------------------------------


class Bracket:
    """An invoke context that writes down what happens in it."""

    def __init__(self, final: Any = None) -> None:
        self.log: list[Any] = []
        self.final = final

    @contextmanager
    def __call__(self, job: Row, run: Row) -> Generator[Callable[[Row], Any]]:
        self.log.append((job["node_id"], run["workflow_name"]))
        try:
            yield self.finalize
        finally:
            self.log.append("exit")

    def finalize(self, delta: Row) -> Any:
        self.log.append(delta)
        return self.final


def test_finalize_sees_the_delta_inside_the_context_and_may_replace_it() -> None:
    bracket = Bracket({"b": 2})
    config.set_invoke_context(bracket)
    assert ran(lambda: {"context_delta": {"a": 1}})["context_delta"] == {"b": 2}
    assert bracket.log == [("n", "w"), {"a": 1}, "exit"]


def test_a_finalize_that_returns_nothing_keeps_the_delta() -> None:
    config.set_invoke_context(Bracket())
    assert ran(lambda: {"a": 1})["context_delta"] == {"a": 1}


def test_a_finalize_that_returns_no_delta_fails_the_node() -> None:
    bracket = Bracket(3)
    config.set_invoke_context(bracket)
    assert "finalize of the invoke context returned int" in broke(nothing)
    assert bracket.log[-1] == "exit"


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1)], ids=repr)
def test_a_failure_leaves_the_context_without_finalize(error: BaseException) -> None:
    bracket = Bracket()
    config.set_invoke_context(bracket)
    broke(_raise(error))
    assert bracket.log == [("n", "w"), "exit"]


def test_a_cancel_leaves_the_context_without_finalize() -> None:
    bracket, cancel = Bracket(), threading.Event()
    config.set_invoke_context(bracket)
    job = claimed(lambda: cancel.set())
    assert node_executor.execute_node(job, cancel_event=cancel) == "skipped"
    assert bracket.log == [("n", "w"), "exit"]


def test_a_context_that_swallows_the_error_does_not_hide_the_failure() -> None:
    @contextmanager
    def swallow(_job: Row, _run: Row) -> Generator[Callable[[Row], Any]]:
        with suppress(RuntimeError):
            yield lambda delta: delta

    config.set_invoke_context(swallow)
    assert broke(_raise(RuntimeError("seen"))) == "RuntimeError: seen"


def test_on_node_completed_comes_after_the_commit() -> None:
    heard: list[Any] = []

    def hook(job: Row, run: Row, delta: Row) -> None:
        heard.append((state(job), job["status"], run["id"], delta))

    queue_workflows.set_on_node_completed(hook)
    row = ran(lambda: {"a": 1})
    assert heard == [("completed", "completed", row["run_id"], {"a": 1})]


@pytest.mark.parametrize("error", [RuntimeError("hook"), SystemExit(1)], ids=repr)
def test_on_node_completed_is_best_effort(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(*_: Any) -> None:
        raise error

    queue_workflows.set_on_node_completed(hook)
    assert ran(nothing)["status"] == "completed"
    assert "on_node_completed for node n failed" in caplog.text


def test_on_node_completed_hears_of_no_failure_and_of_no_parked_node() -> None:
    heard: list[Any] = []
    queue_workflows.set_on_node_completed(lambda *given: heard.append(given))
    broke(_raise(RuntimeError("no")))
    assert node_executor.execute_node(claimed(None, node_module="__input__x")) == "completed"
    assert heard == []


# --- inputs that refer -------------------------------------------------------------------------


def test_what_a_template_came_to_is_stored_and_data_that_looks_like_a_ref_stays_data() -> None:
    got = Got()
    trap = {"$from": "nowhere"}
    job = claimed(
        lambda a, b: got.keep(a=a, b=b),
        run={"context": {"x": {"y": [1, trap]}}},
        inputs={"a": {"$from": "x.y"}, "b": {"$value": trap}},
    )
    assert node_executor.execute_node(job) == "completed", now(job)["error"]
    assert got.values == {"a": [1, trap], "b": trap}
    assert now(job)["resolved_inputs"] == got.values


# --- models ------------------------------------------------------------------------------------


def test_a_model_is_loaded_once_with_events_and_then_warm(cache: model_cache.ModelCache) -> None:
    loads: list[str] = []

    def load() -> str:
        loads.append("m")
        return "handle"

    model_registry.register(model_registry.ModelSpec("m", load))
    body = lambda model_handle, model_load_seconds: {  # noqa: E731
        "handle": model_handle, "cold": model_load_seconds > 0
    }  # fmt: skip
    cold, warm = (claimed(body, required_model="m") for _ in range(2))
    for job in (cold, warm):
        assert node_executor.execute_node(job, model_cache=cache) == "completed"
    assert now(cold)["context_delta"] == {"handle": "handle", "cold": True}
    assert now(warm)["context_delta"] == {"handle": "handle", "cold": False}
    assert loads == ["m"]
    assert events(cold) == ["claimed", "model_load_start", "model_load_done", "completed"]
    assert events(warm) == ["claimed", "completed"]


def test_the_model_is_busy_while_the_body_runs_and_idle_after_a_failure() -> None:
    cache = model_cache.ModelCache(idle_ttl_s=1e-9)
    model_registry.register(model_registry.ModelSpec("m", object))
    reaped: list[bool] = []

    def body() -> Row:
        reaped.append(cache.reap_idle_once())
        raise RuntimeError

    try:
        job = claimed(body, required_model="m")
        assert node_executor.execute_node(job, model_cache=cache) == "failed"
        assert reaped == [False]
        assert cache.reap_idle_once() is True
    finally:
        model_registry.clear_for_tests()


def test_a_load_error_fails_the_job_and_leaves_the_cache_usable(
    cache: model_cache.ModelCache,
) -> None:
    def bad() -> Any:
        raise MemoryError("no room")

    model_registry.register(model_registry.ModelSpec("bad", bad))
    model_registry.register(model_registry.ModelSpec("good", lambda: "handle"))
    ran_bodies: list[Any] = []
    job = claimed(ran_bodies.append, required_model="bad")
    assert node_executor.execute_node(job, model_cache=cache) == "failed"
    assert "loading model 'bad' failed: MemoryError: no room" in now(job)["error"]
    assert events(job) == ["claimed", "model_load_start", "failed"]
    assert not ran_bodies
    good = claimed(lambda model_handle: {"h": model_handle}, required_model="good")
    assert node_executor.execute_node(good, model_cache=cache) == "completed"
    assert now(good)["context_delta"] == {"h": "handle"}


def test_an_unknown_model_fails_the_job_and_names_it(cache: model_cache.ModelCache) -> None:
    job = claimed(nothing, required_model="nobody")
    assert node_executor.execute_node(job, model_cache=cache) == "failed"
    assert "unknown model 'nobody'" in now(job)["error"]


def test_a_job_with_a_model_fails_where_there_is_no_cache() -> None:
    assert "no model cache" in broke(nothing, required_model="m")
