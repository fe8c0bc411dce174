"""Running one node: its arguments, folders, result, invoke context and model."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, Union

import pytest

import queue_workflows
from queue_workflows import (
    config,
    db,
    errors,
    model_registry,
    node_executor,
    node_queue,
    run_store,
    runs,
)
from queue_workflows.model_cache import ModelCache
from queue_workflows.model_registry import ModelSpec
from tests.support import console, constants, factories, flow, tabled, transitions

if TYPE_CHECKING:
    from somewhere_else import Unknown

Row = dict[str, Any]


pytestmark = pytest.mark.usefixtures("invariants_hold")


def claimed(
    body: Any = None, *, out_dir: Path | None = None, context: Any = None, **job: Any
) -> Row:
    """A node job under a claim of this process; its handler is registered as `body`."""
    if body is not None:
        queue_workflows.register_node("body", body)
    run_id = run_store.insert_run(
        workflow_name="w", status="running", out_dir=out_dir, context=context
    )["id"]
    given = {"node_id": "s/n", "node_module": "body", "queue": "cpu"} | job
    node_queue.enqueue_node_job(run_id=run_id, **given)
    take = (
        node_queue.claim_next_cpu_job if given["queue"] == "cpu" else node_queue.claim_next_gpu_job
    )
    row = take(host="box")
    assert row is not None
    return row


def after(job: Row) -> Row:
    found = node_queue.get_node_job(job["id"])
    assert found is not None
    return found


def run(body: Any, inputs: Row | None = None, **more: Any) -> Row:
    """The job's row after its handler has run with these inputs."""
    job = claimed(body, inputs=inputs, **more)
    node_executor.execute_node(job)
    return after(job)


def failure(body: Any, inputs: Row | None = None, **more: Any) -> str:
    row = run(body, inputs, **more)
    assert row["status"] == "failed"
    return row["error"]


def returning(value: Any) -> Callable[[], Any]:
    return lambda: value


# --- the job that runs


def test_a_node_can_read_its_job() -> None:
    reported: list[Any] = []
    cancel = threading.Event()

    def body(text: str) -> Row:
        job = queue_workflows.current_job()
        job.report(0.5)
        with pytest.raises(errors.InvalidConfig, match="a node returns its result"):
            job.set_result({})
        return {
            "id": job.id,
            "run_id": job.run_id,
            "node_id": job.node_id,
            "attempt": job.attempt,
            "claim": job.claim,
            "key": job.idempotency_key,
            "worker": job.worker,
            "args": job.args,
            "name": job.task_name,
            "queue": job.queue,
            "cancelled": job.cancel_requested,
            "shown": repr(job),
        }

    job = claimed(body, inputs={"text": "x"})
    node_executor.execute_node(job, cancel_event=cancel, status_callback=reported.append)
    assert after(job)["context_delta"] == {
        "id": job["id"],
        "run_id": job["run_id"],
        "node_id": "s/n",
        "attempt": 1,
        "claim": 1,
        "key": job["id"],
        "worker": job["worker_id"],
        "args": {"text": "x"},
        "name": "body",
        "queue": "cpu",
        "cancelled": False,
        "shown": f"<job {job['id']} of node 's/n', attempt 1>",
    }
    assert reported == [0.5]
    with pytest.raises(errors.NoCurrentJob):
        queue_workflows.current_job()


def test_another_attempt_has_the_same_key_and_another_claim() -> None:
    seen: list[tuple[str, int, int]] = []

    def body() -> None:
        job = queue_workflows.current_job()
        seen.append((job.idempotency_key, job.attempt, job.claim))
        if len(seen) == 1:
            raise queue_workflows.Retry(0)

    job = claimed(body)
    with db.transaction() as conn:
        conn.execute("UPDATE workflow_node_jobs SET max_attempts = 2")
    node_executor.execute_node(job)
    again = node_queue.claim_next_cpu_job(host="box")
    assert again is not None
    node_executor.execute_node(again)
    assert seen == [(job["id"], 1, 1), (job["id"], 2, 2)]


# --- arguments


def arguments(body: Callable[..., Any], inputs: Row, **more: Any) -> Row:
    """What a handler that returns its `locals()` was called with."""
    row = run(body, inputs, **more)
    assert row["error"] is None
    return row["context_delta"]


def test_inputs_are_bound_by_name_and_none_takes_the_default() -> None:
    def body(a: int, b: int = 5, c: int | None = 6, d: Any = 7) -> Row:
        return dict(locals())

    assert arguments(body, {"a": 1, "b": None, "c": 2}) == {"a": 1, "b": 5, "c": 2, "d": 7}
    assert arguments(body, {"a": None}) == {"a": None, "b": 5, "c": 6, "d": 7}
    assert arguments(body, {"a": 1, "extra": 2}) == {"a": 1, "b": 5, "c": 6, "d": 7}


def test_a_rest_parameter_takes_the_inputs_that_no_other_does() -> None:
    def body(a: int = 5, **rest: Any) -> Row:
        return {"a": a, "rest": rest}

    assert arguments(body, {"a": None, "b": None, "c": 3}) == {"a": 5, "rest": {"b": None, "c": 3}}


def test_a_missing_argument_fails_the_node_and_is_named() -> None:
    def body(needed: int) -> None:
        raise AssertionError

    assert "missing 1 required positional argument: 'needed'" in failure(body, {"other": 1})


def _plain(x: Path) -> Row:
    return {"kind": type(x).__name__}


def _union(x: Path | None) -> Row:
    return {"kind": type(x).__name__}


def _optional(x: Optional[Path]) -> Row:  # noqa: UP045  the old spelling
    return {"kind": type(x).__name__}


def _old_union(x: Union[int, Path]) -> Row:  # noqa: UP007  the old spelling
    return {"kind": type(x).__name__}


def _beside_unknown(x: Path | None, y: Unknown | None = None) -> Row:
    return {"kind": type(x).__name__}


def _noted(x: Annotated[Path, "where"]) -> Row:
    return {"kind": type(x).__name__}


def _text(x: str) -> Row:
    return {"kind": type(x).__name__}


def _bare(x) -> Row:  # type: ignore[no-untyped-def]
    return {"kind": type(x).__name__}


def _listed(x: list[Path]) -> Row:
    return {"kind": type(x).__name__}


class _Method:
    def run(self, x: Path) -> Row:
        return {"kind": type(x).__name__}


class _Callable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Path) -> Row:
        return {"kind": type(x).__name__}


PATHS = [
    _plain, _union, _optional, _old_union, _beside_unknown, _noted, _Method(), _Callable(),
    partial(_plain),
]  # fmt: skip


def test_text_for_a_parameter_annotated_path_becomes_a_path() -> None:
    for body in PATHS:
        with tabled.case(body):
            assert arguments(body, {"x": "/a/b"}) == {"kind": type(Path()).__name__}


@pytest.mark.parametrize("body", [_text, _bare, _listed])
def test_text_for_any_other_parameter_stays_text(body: Any) -> None:
    assert arguments(body, {"x": "/a/b"}) == {"kind": "str"}


def test_a_parameter_annotated_path_takes_what_is_no_text_as_it_is() -> None:
    assert arguments(_union, {"x": None}) == {"kind": "NoneType"}
    assert arguments(_old_union, {"x": 3}) == {"kind": "int"}


def test_what_the_engine_offers_is_bound_by_name(tmp_path: Path) -> None:
    seen: Row = {}

    def body(
        inputs: Row, out: Path, scratch: Path, model_handle: Any, model_load_seconds: float | None,
        cancel_event: threading.Event, status_callback: Callable[..., object],
    ) -> None:  # fmt: skip
        seen.update(locals())
        status_callback(0.5)
        status_callback({"any": "thing"}, more=1)
        assert out.is_dir()
        assert scratch.is_dir()

    assert run(body, {"k": 1}, out_dir=tmp_path)["status"] == "completed"
    assert (seen["inputs"], seen["out"]) == ({"k": 1}, tmp_path / "s" / "n")
    assert (seen["model_handle"], seen["model_load_seconds"]) == (None, None)
    assert isinstance(seen["cancel_event"], threading.Event)


def test_an_input_replaces_no_object_of_the_engine(tmp_path: Path) -> None:
    seen: Row = {}

    def body(
        inputs: Any, out: Any, model_handle: Any, cancel_event: Any, status_callback: Any, x: int
    ) -> None:
        seen.update(locals())

    given = dict.fromkeys(("inputs", "out", "model_handle", "cancel_event", "status_callback"), "y")
    assert run(body, {**given, "x": 1}, out_dir=tmp_path)["status"] == "completed"
    assert (seen["inputs"], seen["x"]) == ({**given, "x": 1}, 1)
    assert (seen["out"], seen["model_handle"]) == (tmp_path / "s" / "n", None)
    assert isinstance(seen["cancel_event"], threading.Event)
    assert callable(seen["status_callback"])


def test_an_input_wins_over_any_other_offer_of_its_name() -> None:
    def body(scratch: Any, model_load_seconds: Any) -> Row:
        return dict(locals())

    given = {"scratch": "mine", "model_load_seconds": 5}
    assert arguments(body, given) == given


def test_the_rest_gets_the_inputs_that_no_parameter_has() -> None:
    def body(out: Path, **rest: Any) -> Row:
        return {"out": out.name, **rest}

    found = arguments(body, {"out": "mine", "inputs": 1, "x": 2})
    assert found == {"out": "n", "inputs": 1, "x": 2}


def test_the_callers_event_and_callback_reach_the_handler() -> None:
    event, heard = threading.Event(), list[Any]()

    def body(cancel_event: threading.Event, status_callback: Callable[..., object]) -> Row:
        status_callback(0.5)
        return {"same": cancel_event is event}

    job = claimed(body)
    node_executor.execute_node(job, cancel_event=event, status_callback=heard.append)
    assert (after(job)["context_delta"], heard) == ({"same": True}, [0.5])


def test_whether_a_handler_reports_progress_is_seen_by_its_parameters() -> None:
    assert node_executor.takes_status_callback(lambda status_callback: None)
    assert not node_executor.takes_status_callback(lambda **rest: None)


# --- folders


def test_out_is_shared_by_attempts_and_scratch_is_each_ones_own(tmp_path: Path) -> None:
    scratches: list[Path] = []

    def body(out: Path, scratch: Path) -> Row:
        scratches.append(scratch)
        before = sorted(path.name for path in out.iterdir())
        (out / f"try-{len(scratches)}").touch()
        (scratch / "deep").mkdir()
        (scratch / "deep" / "waste").write_text("x")
        if len(scratches) == 1:
            raise ValueError("again")
        return {"before": before}

    job = claimed(body, out_dir=tmp_path)
    with db.connection() as conn:
        conn.execute("UPDATE workflow_node_jobs SET max_attempts = 2")
    assert node_executor.execute_node(job) == "failed"
    with db.connection() as conn:
        conn.execute("UPDATE workflow_node_jobs SET available_at = now()")
    again = node_queue.claim_next_cpu_job(host="box")
    assert again is not None
    assert node_executor.execute_node(again) == "completed"
    assert after(job)["context_delta"] == {"before": ["try-1"]}
    assert len({*scratches}) == 2
    assert not any(path.exists() for path in scratches)
    assert all(tmp_path in path.parents for path in scratches)


def test_a_run_without_out_dir_has_its_folder_in_the_outputs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(tmp_path))

    def body(out: Path, scratch: Path) -> Row:
        assert scratch.is_dir()
        return {"out": str(out), "scratch": str(scratch)}

    found = arguments(body, {})
    assert Path(found["out"]).is_relative_to(tmp_path.resolve())
    assert Path(found["scratch"]).is_relative_to(tmp_path.resolve())
    assert Path(found["out"]).is_dir()
    assert not Path(found["scratch"]).exists()


def test_no_folder_is_made_for_a_handler_without_out(tmp_path: Path) -> None:
    run(lambda: None, out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("node_id", "folder"),
    [
        ("../x", "%2E%2E/x"),
        ("a/../../x", "a/%2E%2E/%2E%2E/x"),
        (".", "%2E"),
        ("s/../..", "s/%2E%2E/%2E%2E"),
        ("s/a b.c é", "s/a b.c é"),
    ],
)
def test_a_node_id_of_dots_leads_nowhere_else(tmp_path: Path, node_id: str, folder: str) -> None:
    row = run(lambda out: (out / "x").touch(), out_dir=tmp_path / "run", node_id=node_id)
    assert row["status"] == "completed", row["error"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / "run" / folder / "x"
    ]


@pytest.mark.parametrize("node_id", ["/etc/x", "link/x", "link/.."])
def test_a_node_id_that_leads_outside_the_runs_folder_is_refused(
    tmp_path: Path, node_id: str
) -> None:
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "link").symlink_to(tmp_path)
    reason = failure(lambda out: None, out_dir=out_dir, node_id=node_id)
    assert f"node id {node_id!r} leads outside the run's out_dir" in reason
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_deep_node_id_gets_a_deep_folder(tmp_path: Path) -> None:
    run(lambda out: (out / "x").touch(), out_dir=tmp_path / "not" / "yet", node_id="a/b/c")
    assert (tmp_path / "not" / "yet" / "a" / "b" / "c" / "x").exists()


# --- results


def test_a_result_becomes_the_context_delta() -> None:
    cases: list[Any] = [
        ({"a": 1}, {"a": 1}),
        ({"context_delta": {"a": 1}}, {"a": 1}),
        ({"context_delta": {"a": 1}, "seconds": 3}, {"a": 1}),
        ({"context_delta": None}, {}),
        ({"context_delta": 5}, {"context_delta": 5}),
        ({}, {}),
        (None, {}),
        (5, {}),
        ("text", {}),
        ([1, 2], {}),
        (("a", "b"), {}),
        ({"t": (1, 2)}, {"t": [1, 2]}),
    ]
    for value, delta in cases:
        with tabled.case(value, delta):
            row = run(returning(value))
            assert (row["status"], row["context_delta"]) == ("completed", delta)


def deep(levels: int) -> Row:
    value: Row = {}
    for _ in range(levels):
        value = {"d": value}
    return value


loop: Row = {}
loop["loop"] = loop


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": "x\x00y"}, "NUL"),
        ({"a\x00": 1}, "NUL"),
        ({"a": math.nan}, "JSON cannot carry"),
        ({"a": math.inf}, "JSON cannot carry"),
        ({"a": "\ud800"}, "surrogate"),
        ({"a": {1, 2}}, "JSON cannot carry"),
        ({"a": b"bytes"}, "JSON cannot carry"),
        ({"a": object()}, "JSON cannot carry"),
        ({1: 2}, "key 1 is not a string"),
        ({"a": "x" * 1_100_000}, "MAX_PAYLOAD_KB"),
        (deep(3000), "nested deeper"),
        (loop, "nested deeper"),
        ({"a": 10**5000}, "a number beyond"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_result_that_cannot_be_stored_fails_the_node_with_the_reason(
    value: Any, reason: str
) -> None:
    error = failure(returning(value))
    assert error.startswith("InvalidPayload: result of node 's/n'")
    assert reason in error
    with db.connect() as conn:
        trace = factories.one(
            conn,
            "SELECT detail ->> 'traceback' FROM workflow_node_events WHERE detail ? 'traceback'",
        )
    # No code of the app raised: the engine's own frames do not help its author.
    assert trace.strip() == f"queue_workflows.errors.{error}"


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (ValueError("a\x00b \ud800"), "ValueError: a\ufffdb \ufffd"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "the handler called sys.exit(3)"),
        (SystemExit(), "the handler called sys.exit(None)"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit("odd"), "GeneratorExit: odd"),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 9000), "ValueError: " + "x" * 7988),
    ],
    ids=repr,
)
def test_whatever_a_handler_raises_fails_its_node_and_is_reported(
    raised: BaseException, error: str
) -> None:
    def body() -> None:
        raise raised

    assert failure(body) == error


def test_an_error_whose_text_cannot_be_had_fails_its_node_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    def body() -> None:
        raise Mute

    assert failure(body).startswith("Mute")


def test_the_traceback_goes_to_the_history() -> None:
    def body() -> None:
        raise ValueError("no")

    job = claimed(body)
    node_executor.execute_node(job)
    with db.connect() as conn:
        detail = factories.one(
            conn, "SELECT detail FROM workflow_node_events WHERE event_type = 'failed'"
        )
    assert "in body" in detail["traceback"]


def test_ctrl_c_is_the_operators_and_not_the_bodys() -> None:
    def body() -> None:
        raise KeyboardInterrupt

    job = claimed(body)
    with pytest.raises(KeyboardInterrupt):
        node_executor.execute_node(job)
    assert after(job)["status"] == "running"


def test_a_failed_node_has_its_event_and_error() -> None:
    job = claimed(returning({1: 1}))
    assert node_executor.execute_node(job) == "failed"
    (event,) = node_queue.list_unprocessed_dispatch_events()
    assert (event["kind"], event["node_id"], event["claim_no"]) == ("failed", "s/n", 1)


def test_a_node_that_nobody_knows_fails_and_is_named() -> None:
    assert "'body' is not registered" in failure(None)
    config.set_node_resolver(lambda name: object())
    assert "node module 'body' has no run()" in failure(None)


def test_a_node_that_nobody_knows_names_the_worker_and_the_age_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters_of_old.py").write_text("__version__ = '1.7'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "a worker without an app (queue_workflows" in failure(None)
    console.printed("status", "--app", "letters_of_old")
    row = run(None)
    made = (run_store.get_run(row["run_id"]) or {})["created_at"]
    version = queue_workflows.__version__
    assert f"worker of app letters_of_old 1.7 (queue_workflows {version}, pid " in row["error"]
    assert f"the run exists since {made:%Y-%m-%d %H:%M:%S} UTC" in row["error"]
    del sys.modules["letters_of_old"]


def test_no_string_of_a_row_is_ever_imported() -> None:
    assert failure(None, node_module="cProfile").startswith("NodeNotFound")
    config.set_node_module_package("tests.support")
    assert failure(None, node_module="..cProfile").startswith("NodeNotFound")


def test_seconds_and_memory_are_measured() -> None:
    row = run(lambda cancel_event: cancel_event.wait(0.05) and None)
    assert 0.05 <= row["seconds"] < 5
    assert row["vm_rss_mb_peak"] > 5


# --- what the node received


def test_resolved_inputs_are_what_the_node_received() -> None:
    inputs = {"x": {"$from": "k"}, "y": 2}
    row = run(lambda x, y: {"x": x}, inputs, context={"k": "v"})
    assert (row["inputs"], row["resolved_inputs"]) == (inputs, {"x": "v", "y": 2})
    assert row["context_delta"] == {"x": "v"}


def test_resolved_inputs_are_stored_for_plain_inputs_too(toy: flow.Flow) -> None:
    wanted = [{"name": "x", "from": "pipeline.x"}]
    flow.body(lambda x: None, "plain")
    toy.define(flow.step("s", inputs={"x": 3}), s=[{"id": "a", "node": "plain", "inputs": wanted}])
    run_id = toy.submit()
    toy.go()
    assert flow.job(run_id, "s/a")["resolved_inputs"] == {"x": 3}


# --- the app's bracket


class Bracket:
    """An invoke context that notes what happens to it."""

    def __init__(self, finalize: Callable[[Row], Any] = dict, swallow: bool = False) -> None:
        self.seen: list[Any] = []
        self.finalize = finalize
        self.swallow = swallow

    @contextmanager
    def __call__(self, job: Row, run: Row) -> Generator[Callable[[Row], Any]]:
        self.seen.append(("enter", job["node_id"], run["workflow_name"]))
        try:
            yield self._finalize
        except BaseException as error:
            self.seen.append(("raised", type(error).__name__))
            if not self.swallow:
                raise
        finally:
            self.seen.append("exit")

    def _finalize(self, delta: Row) -> Any:
        self.seen.append(("finalize", delta))
        return self.finalize(delta)


ENTER = ("enter", "s/n", "w")


def bracketed(body: Callable[..., Any], bracket: Bracket, **more: Any) -> Row:
    queue_workflows.set_invoke_context(bracket)
    job = claimed(body)
    node_executor.execute_node(job, **more)
    return after(job)


def test_the_bracket_is_entered_finalizes_a_success_and_is_left() -> None:
    bracket = Bracket(lambda delta: {**delta, "stamped": True})
    row = bracketed(returning({"a": 1}), bracket)
    assert bracket.seen == [ENTER, ("finalize", {"a": 1}), "exit"]
    assert row["context_delta"] == {"a": 1, "stamped": True}


@pytest.mark.parametrize("swallow", [False, True])
def test_a_handler_that_fails_is_not_finalized_and_fails_whatever_the_bracket_does(
    swallow: bool,
) -> None:
    def body() -> None:
        raise ValueError("no")

    bracket = Bracket(swallow=swallow)
    row = bracketed(body, bracket)
    assert bracket.seen == [ENTER, ("raised", "ValueError"), "exit"]
    assert (row["status"], row["error"]) == ("failed", "ValueError: no")


def test_a_finalize_that_returns_nothing_leaves_the_delta() -> None:
    assert bracketed(returning({"a": 1}), Bracket(lambda delta: None))["context_delta"] == {"a": 1}


@pytest.mark.parametrize("finalize", [lambda delta: 5, lambda delta: 1 / 0, lambda delta: {1: 2}])
def test_a_finalize_that_cannot_be_used_fails_the_node(finalize: Callable[[Row], Any]) -> None:
    bracket = Bracket(finalize)
    assert bracketed(returning({"a": 1}), bracket)["status"] == "failed"
    assert bracket.seen[-1] == "exit"


def test_a_bracket_that_cannot_be_entered_fails_the_node() -> None:
    def broken(job: Row, run: Row) -> Any:
        raise OSError("no mock flag")

    queue_workflows.set_invoke_context(broken)
    assert failure(lambda: None) == "OSError: no mock flag"


def test_a_cancelled_handler_is_not_finalized() -> None:
    event = threading.Event()
    bracket = Bracket()
    bracketed(event.set, bracket, cancel_event=event)
    assert bracket.seen == [ENTER, "exit"]


# --- after the commit


def test_the_completion_hook_runs_after_the_commit() -> None:
    seen: list[Any] = []

    def hook(job: Row, run: Row, delta: Row) -> None:
        with db.connect() as conn:
            seen.append(factories.reread(conn, job)["status"])
        seen.append((job["status"], run["workflow_name"], delta))

    queue_workflows.set_on_node_completed(hook)
    run(returning({"context_delta": {"a": 1}}))
    assert seen == ["completed", ("completed", "w", {"a": 1})]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)], ids=repr)
def test_a_completion_hook_that_fails_is_only_logged(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def hook(job: Row, run: Row, delta: Row) -> None:
        raise error

    queue_workflows.set_on_node_completed(hook)
    assert run(returning({"a": 1}))["status"] == "completed"
    assert "on_node_completed for node s/n failed" in caplog.text


def test_the_completion_hook_is_not_called_for_what_did_not_complete() -> None:
    seen: list[Any] = []
    queue_workflows.set_on_node_completed(lambda *args: seen.append(args))
    run(returning({1: 1}))
    run(None, node_module="__input__x", node_id="q")
    lost = claimed(returning({}))
    node_queue.mark_completed(lost["id"], context_delta={})
    node_executor.execute_node(lost)
    assert seen == []


# --- cancelled, lost, parked


def test_a_cancelled_handler_stores_nothing() -> None:
    event = threading.Event()

    def body(cancel_event: threading.Event) -> Row:
        cancel_event.set()
        return {"a": 1}

    job = claimed(body)
    runs.cancel(job["run_id"])
    assert node_executor.execute_node(job, cancel_event=event) == "skipped"
    row = after(job)
    assert (row["status"], row["context_delta"]) == ("cancelled", {})


def test_a_handler_that_raises_because_it_was_cancelled_has_not_failed() -> None:
    event = threading.Event()

    def body(cancel_event: threading.Event) -> Row:
        cancel_event.set()
        raise InterruptedError

    job = claimed(body)
    assert node_executor.execute_node(job, cancel_event=event) == "skipped"
    assert after(job)["status"] == "queued"


@pytest.mark.parametrize("value", [{"a": 1}, {1: 1}], ids=["success", "failure"])
def test_a_lost_claim_writes_nothing(value: Any) -> None:
    job = claimed(returning(value))
    with db.connect() as conn:
        transitions.expire(conn, job)
    node_queue.reclaim_expired_leases()
    assert node_executor.execute_node(job) == "skipped"
    row = after(job)
    assert (row["status"], row["context_delta"], row["error"]) == ("queued", {}, None)
    assert node_queue.count_unprocessed_dispatch_events() == 0


def test_an_input_node_is_parked() -> None:
    job = claimed(None, node_module="__input__anything")
    assert node_executor.execute_node(job) == "completed"
    assert after(job)["status"] == "awaiting_input"
    (event,) = node_queue.list_unprocessed_dispatch_events()
    assert event["kind"] == "awaiting_input"


# --- an outage around the handler


@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_the_database_fails_is_tried_again_and_not_the_nodes_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    constants.put(monkeypatch, "claim.manual_claims.AGAIN_FIRST_S", 0.001)
    failures = [db.OperationalError("gone")] * times

    def fail() -> None:
        if failures:
            raise failures.pop()

    flow.before_input_reads(monkeypatch, fail)
    assert run(returning({"a": 1}))["context_delta"] == {"a": 1}
    said = [text for text in caplog.messages if "the database" in text]
    assert said == ["waiting for the database: gone", "the database is back"]


def test_waiting_for_the_database_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()

    def away() -> None:
        event.set()
        raise db.OperationalError("gone")

    job = claimed(returning({}))
    flow.before_input_reads(monkeypatch, away)
    assert node_executor.execute_node(job, cancel_event=event) == "skipped"


def test_a_database_error_of_the_app_is_the_handlers_failure() -> None:
    def body() -> None:
        raise db.OperationalError("the host's own")

    assert failure(body) == "OperationalError: the host's own"


# --- models


def gpu(body: Any, model: str | None = "m", **more: Any) -> Row:
    return claimed(body, queue="gpu", required_model=model, **more)


def model_events(job: Row) -> list[str]:
    with db.connect() as conn:
        return factories.column(
            conn,
            "SELECT event_type FROM workflow_node_events WHERE job_id = %s"
            " AND event_type LIKE 'model%%' ORDER BY id",
            job["id"],
        )


def test_a_model_is_loaded_for_its_node_and_handed_over() -> None:
    model_registry.register(ModelSpec("m", lambda: {"weights": 3}))
    cache = ModelCache()
    job = gpu(lambda model_handle, model_load_seconds: {
        "weights": model_handle["weights"], "cold": model_load_seconds > 0,
    })  # fmt: skip
    assert node_executor.execute_node(job, model_cache=cache) == "completed"
    assert after(job)["context_delta"] == {"weights": 3, "cold": True}
    assert model_events(job) == ["model_load_start", "model_load_done"]
    assert cache.current_model == "m"


def test_a_warm_model_is_not_loaded_again() -> None:
    loads: list[int] = []
    model_registry.register(ModelSpec("m", lambda: loads.append(1) or object()))
    cache = ModelCache()
    for node_id in ("a", "b"):
        job = gpu(lambda model_load_seconds: {"s": model_load_seconds}, node_id=node_id)
        node_executor.execute_node(job, model_cache=cache)
    assert (len(loads), after(job)["context_delta"], model_events(job)) == (1, {"s": 0.0}, [])


def test_a_model_that_does_not_load_fails_its_node() -> None:
    def load() -> Any:
        raise MemoryError("24 GB short")

    model_registry.register(ModelSpec("m", load))
    cache = ModelCache()
    job = gpu(lambda: pytest.fail("the body ran"))
    assert node_executor.execute_node(job, model_cache=cache) == "failed"
    assert after(job)["error"] == (
        "ModelLoadFailed: loading model 'm' failed: MemoryError: 24 GB short"
    )
    assert (cache.current_model, model_events(job)) == (None, ["model_load_start"])


def test_an_unknown_model_and_a_worker_without_models_fail_the_node() -> None:
    job = gpu(lambda: None)
    node_executor.execute_node(job, model_cache=ModelCache())
    assert "unknown model 'm'" in after(job)["error"]
    job = gpu(lambda: None)
    node_executor.execute_node(job)
    assert "needs model 'm', and this worker has no model cache" in after(job)["error"]


def test_a_gpu_node_without_a_model_loads_none() -> None:
    cache = ModelCache()
    job = gpu(lambda model_handle: {"handle": model_handle}, model=None)
    assert node_executor.execute_node(job, model_cache=cache) == "completed"
    assert (after(job)["context_delta"], cache.current_model) == ({"handle": None}, None)


def test_a_model_stays_loaded_while_its_node_runs() -> None:
    model_registry.register(ModelSpec("m", object))
    cache = ModelCache(idle_ttl_s=1e-9)

    def body() -> Row:
        return {"dropped": cache.reap_idle_once()}

    job = gpu(body)
    node_executor.execute_node(job, model_cache=cache)
    assert after(job)["context_delta"] == {"dropped": False}
    assert cache.reap_idle_once() is True
