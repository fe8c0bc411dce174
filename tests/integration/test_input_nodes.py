"""Input nodes: the question to a person, and the answer, which counts once."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import config, db, dispatcher, errors, input_listener, node_queue
from tests.support import factories, flow, tabled, wait

pytestmark = pytest.mark.usefixtures("invariants_hold")


def asked(toy: flow.Flow, widget: str = "file_upload", *, context: Any = None, **keys: Any) -> str:
    """A run whose input node `q` is parked, with `s/a` behind it; its id."""
    toy.define(
        flow.ask("q", widget, **keys),
        flow.step("s", depends_on=["q"]),
        s=flow.nodes(a=""),
    )
    run_id = toy.started(context=context)
    assert node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"]) is not None
    toy.look()
    return run_id


def submit(run_id: str, value: Any, node_id: str = "q") -> str:
    """An answer by an app's plain SQL; its id."""
    with db.connection() as mine:
        return factories.insert(
            mine, "workflow_input_submissions", run_id=run_id, node_id=node_id, value=Jsonb(value)
        )["id"]


def answer(conn: Any, submission_id: str) -> dict[str, Any]:
    row = conn.execute(
        "SELECT * FROM workflow_input_submissions WHERE id = %s", (submission_id,)
    ).fetchone()
    assert row is not None
    return row


def spec(run_id: str) -> dict[str, Any]:
    return flow.job(run_id, "q")["input_spec"]


# --- parking


def test_an_input_node_is_parked_and_nothing_is_imported_for_it(toy: flow.Flow, conn: Any) -> None:
    def resolver(name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    config.set_node_resolver(resolver)
    toy.define(flow.ask("q"))
    run_id = toy.submit()
    toy.look()
    assert toy.work() == 1
    job = flow.job(run_id, "q")
    assert (job["node_module"], job["queue"]) == ("__input__file_upload", "cpu")
    assert job["inputs"] == {"widget": "file_upload", "target": "answer"}
    assert (job["worker_id"], job["lease_expires_at"], job["claim_no"]) == (None, None, 1)
    assert flow.status(run_id) == "running"
    kinds = factories.column(conn, "SELECT kind FROM workflow_dispatch_events")
    assert kinds == ["awaiting_input"]
    toy.look()
    assert job["input_spec"] is None
    assert spec(run_id)["step_id"] == "q"
    assert node_queue.count_unprocessed_dispatch_events() == 0


def test_every_input_spec_names_step_widget_prompt_and_target(toy: flow.Flow) -> None:
    run_id = asked(toy, "anything", prompt="Which?", colour="red", choices=[1, 2])
    assert spec(run_id) == {
        "step_id": "q",
        "widget": "anything",
        "prompt": "Which?",
        "target": "answer",
        "colour": "red",
        "choices": [1, 2],
    }


@pytest.mark.parametrize(
    ("widget", "keys", "wanted"),
    [
        ("choose_one", {"source": {"$from": "list"}}, {"options": [1, 2], "multiple": False}),
        (
            "choose_one",
            {"source": {"$from": "list"}, "multiple": True},
            {"options": [1, 2], "multiple": True},
        ),
        ("choose_one", {"source": {"$from": "no.such"}}, {"options": [], "multiple": False}),
        ("file_upload", {"accept": [".csv"]}, {"accept": [".csv"]}),
        (
            "pick_or_upload",
            {"library": {"$from": "list"}, "accept": "image/*"},
            {"library": [1, 2], "accept": "image/*"},
        ),
        (
            "turnout",
            {
                "turnout_options": [
                    {"label": "Left", "value": "l"},
                    {"label": "Right", "value": "r"},
                ]
            },
            {
                "turnout_options": [
                    {"label": "Left", "value": "l"},
                    {"label": "Right", "value": "r"},
                ]
            },
        ),
    ],
)
def test_a_generic_widget_gets_what_it_needs(
    toy: flow.Flow, widget: str, keys: dict[str, Any], wanted: dict[str, Any]
) -> None:
    found = spec(asked(toy, widget, context={"list": [1, 2]}, **keys))
    assert {key: found[key] for key in wanted} == wanted
    assert found["step_id"] == "q"


def test_choose_one_may_choose_among_files(toy: flow.Flow, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"123")
    (folder / "b.csv").write_text("x")
    picture = {"$from": "made.files", "$filter": {"kind:eq": "image"}}
    toy.define(flow.ask("q", "choose_one", source=picture))
    run_id = toy.started(out_dir=str(tmp_path))
    node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
    toy.look()
    assert spec(run_id)["options"] == [
        {
            "rel_path": "made/a.png",
            "kind": "image",
            "abs_path": str(folder / "a.png"),
            "size_bytes": 3,
        }
    ]


def test_an_apps_widget_is_built_by_the_app(toy: flow.Flow) -> None:
    seen: list[Any] = []

    def build(step: Any, run: Any) -> dict[str, Any]:
        seen.append((step["id"], step["colour"], run["id"]))
        return {"own": "key", "prompt": "Mine?"}

    queue_workflows.register_input_widget("mine", build)
    run_id = asked(toy, "mine", colour="red")
    head = {"step_id": "q", "widget": "mine", "target": "answer"}
    assert (spec(run_id), seen) == (
        {**head, "prompt": "Mine?", "own": "key"},
        [("q", "red", run_id)],
    )


def test_an_apps_builder_wins_over_a_generic_widget(toy: flow.Flow) -> None:
    queue_workflows.register_input_widget("file_upload", lambda step, run: {"own": True})
    found = spec(asked(toy))
    assert (found["widget"], found["own"], "accept" in found) == ("file_upload", True, False)


def test_what_a_builder_does_to_its_step_does_not_reach_another_run(toy: flow.Flow) -> None:
    def build(step: Any, run: Any) -> dict[str, Any]:
        step["choices"].append("x")
        return {"choices": step["choices"]}

    queue_workflows.register_input_widget("mine", build)
    found = [spec(asked(toy, "mine", choices=["a"]))["choices"] for _ in range(2)]
    assert found == [["a", "x"]] * 2


def test_a_worker_leaves_the_spec_to_the_orchestrator(toy: flow.Flow) -> None:
    queue_workflows.register_input_widget("mine", lambda step, run: {"from": "orchestrator"})
    toy.define(
        flow.step("s"),
        flow.ask("q", "mine", depends_on=["s"]),
        s=flow.nodes(a=""),
    )
    run_id = toy.started()
    config.get_config().input_widgets.clear()
    toy.work()
    assert (flow.job(run_id, "q")["status"], spec(run_id)) == ("awaiting_input", None)
    queue_workflows.register_input_widget("mine", lambda step, run: {"from": "orchestrator"})
    toy.look()
    assert spec(run_id)["from"] == "orchestrator"


# --- answers


def test_an_answer_by_plain_sql_completes_the_node_and_moves_the_run_on(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    submission = submit(run_id, {"path": "x"})
    toy.look()
    assert flow.states(run_id) == {"q": "completed", "s/a": "queued"}
    assert flow.job(run_id, "q")["context_delta"] == {"answer": {"path": "x"}}
    row = answer(conn, submission)
    assert (row["status"], row["error"], row["processed_at"] is not None) == (
        "processed",
        None,
        True,
    )
    toy.go()
    assert flow.status(run_id) == "completed"


def test_an_answer_stays_what_it_was(toy: flow.Flow) -> None:
    cases: list[Any] = ["5", 5, 5.5, True, [], {}, "", "null", {"$from": "x"}, ["é", 1]]
    for value in cases:
        with tabled.case(value):
            run_id = asked(toy, "mine")
            queue_workflows.submit_input(run_id, "q", value)
            toy.look()
            found = flow.job(run_id, "q")["context_delta"]["answer"]
            assert (found, type(found)) == (value, type(value))


OPTIONS = {"turnout_options": [{"label": "Five", "value": 5}, {"label": "Six", "value": "6"}]}


def test_an_answer_that_is_json_in_a_text_is_decoded_where_no_text_is_taken(toy: flow.Flow) -> None:
    cases: list[Any] = [
        ("turnout", OPTIONS, "5", 5),
        ("turnout", OPTIONS, "6", "6"),
        ("slider", {}, "5", 5),
        ("mine", {"type": "number"}, "5", 5),
        ("mine", {"type": "number"}, "1e999", "1e999"),
        ("mine", {"type": "boolean"}, "true", True),
        ("mine", {"type": "object"}, '{"a": "5"}', {"a": "5"}),
        ("mine", {"type": "text"}, "5", "5"),
        ("mine", {}, "5", "5"),
        ("file_upload", {}, '{"path": "x"}', {"path": "x"}),
        ("file_upload", {}, '["x"]', ["x"]),
        ("file_upload", {}, "null", None),
        ("file_upload", {}, "5", "5"),
        ("amount", {"$answer_type": "integer"}, "5", 5),
        ("amount", {"$answer_type": "integer"}, "5.0", 5),
        ("number", {"$answer_type": "string"}, "5", "5"),
        ("mine", {"answer_type": "number"}, "five", "five"),
    ]
    for widget, keys, text, value in cases:
        with tabled.case(widget, keys, text, value):
            by_sql, by_call, resumed = (asked(toy, widget, **keys) for _ in range(3))
            submit(by_sql, text)
            queue_workflows.submit_input(by_call, "q", text)
            toy.look()
            dispatcher.resume_after_input(resumed, "q", text)
            for run_id in (by_sql, by_call, resumed):
                job = flow.job(run_id, "q")
                found = job["context_delta"].get("answer")
                assert (job["status"], found, type(found)) == ("completed", value, type(value))


def test_a_null_answer_and_one_without_target_leave_nothing(toy: flow.Flow) -> None:
    null, aimless = asked(toy), asked(toy, target=None)
    queue_workflows.submit_input(null, "q", None)
    queue_workflows.submit_input(aimless, "q", "unheard")
    toy.look()
    for run_id in (null, aimless):
        job = flow.job(run_id, "q")
        assert (job["status"], job["context_delta"]) == ("completed", {})


def test_an_answer_is_read_by_the_nodes_behind_it(toy: flow.Flow) -> None:
    seen: list[Any] = []
    flow.body(lambda x: seen.append(x), "see")
    wanted = [{"name": "x", "from": "pipeline.x"}]
    toy.define(
        flow.ask("q"), flow.step("s", depends_on=["q"], inputs={"x": {"$from": "q.answer.path"}}),
        s=[{"id": "a", "node": "see", "inputs": wanted}],
    )  # fmt: skip
    run_id = toy.submit()
    toy.go()
    queue_workflows.submit_input(run_id, "q", {"path": "p"})
    toy.go()
    assert (seen, flow.status(run_id)) == (["p"], "completed")


def test_the_first_answer_wins_and_the_second_is_refused_in_words(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    queue_workflows.submit_input(run_id, "q", "first")
    with pytest.raises(errors.InputRefused, match=r"node 'q' .* has been answered already"):
        queue_workflows.submit_input(run_id, "q", "second")
    toy.look()
    with pytest.raises(ValueError, match="is completed: it takes no answer now"):
        queue_workflows.submit_input(run_id, "q", "third")
    late = submit(run_id, "fourth")
    toy.look()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "first"}
    row = answer(conn, late)
    assert row["status"] == "failed"
    assert "is completed: it takes no answer now" in row["error"]


def test_an_answer_that_comes_while_the_first_is_being_taken_is_refused(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = asked(toy)
    queue_workflows.submit_input(run_id, "q", "first")
    taken, go_on = threading.Event(), threading.Event()
    take = input_listener._take

    def held(conn: Any, row: Any) -> bool:
        found = take(conn, row)
        taken.set()
        go_on.wait(30)
        return found

    monkeypatch.setattr(input_listener, "_take", held)
    taking = threading.Thread(target=input_listener.InputListener().process_once)
    taking.start()
    assert taken.wait(30)

    def let_go() -> None:
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
        with db.connect() as conn:
            wait.until(lambda: conn.execute(waits).fetchone())
        go_on.set()

    releasing = threading.Thread(target=let_go)
    releasing.start()
    try:
        with pytest.raises(errors.InputRefused, match="it takes no answer now"):
            queue_workflows.submit_input(run_id, "q", "second")
    finally:
        go_on.set()
        taking.join(30)
        releasing.join(30)
    with db.connect() as conn:
        assert factories.column(conn, "SELECT value FROM workflow_input_submissions") == ["first"]


def test_submit_input_refuses_what_takes_no_answer(toy: flow.Flow) -> None:
    run_id = asked(toy)
    with pytest.raises(KeyError, match="no node 'zzz'"):
        queue_workflows.submit_input(run_id, "zzz", 1)
    with pytest.raises(KeyError, match="no node 'q' of run 'nope'"):
        queue_workflows.submit_input("nope", "q", 1)
    for value in (float("nan"), {1, 2}, "\x00"):
        with pytest.raises(errors.InvalidPayload, match="answer to 'q'"):
            queue_workflows.submit_input(run_id, "q", value)
    queue_workflows.submit_input(run_id, "q", 1)
    toy.look()
    with pytest.raises(errors.InputRefused, match=r"'s/a' .* asks for no input"):
        queue_workflows.submit_input(run_id, "s/a", 1)


def test_an_answer_is_checked_as_the_value_that_is_stored(toy: flow.Flow) -> None:
    """An app may give a value of a type that JSON does not have."""
    day, typed = datetime.date(2026, 1, 2), {"$answer_type": "string"}
    run_id = asked(toy, "text", **typed)
    with pytest.raises(errors.InvalidAnswer, match=r'does not take \["2026-01-02"\]'):
        queue_workflows.submit_input(run_id, "q", [day])
    with pytest.raises(errors.InvalidPayload, match=r'does not take \["2026-01-02"\]'):
        dispatcher.resume_after_input(run_id, "q", [day])
    queue_workflows.submit_input(run_id, "q", day)
    toy.look()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "2026-01-02"}
    run_id = asked(toy, "text", **typed)
    assert dispatcher.resume_after_input(run_id, "q", Path("a/b.csv")) == 1
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "a/b.csv"}


def test_an_answer_for_a_node_that_does_not_exist_is_refused_in_words(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    wrong = submit(run_id, 1, node_id="zzz")
    toy.look()
    row = answer(conn, wrong)
    assert (row["status"], row["error"]) == ("failed", f"there is no node 'zzz' of run {run_id!r}")


def test_an_answer_that_comes_before_the_node_has_parked_is_kept(toy: flow.Flow, conn: Any) -> None:
    toy.define(flow.ask("q"))
    run_id = toy.started()
    submission = queue_workflows.submit_input(run_id, "q", "early")
    toy.look()
    row = answer(conn, submission)
    assert (row["status"], row["error"]) == (
        "pending",
        f"node 'q' of run {run_id!r} does not wait yet",
    )
    toy.work()
    conn.execute("UPDATE workflow_input_submissions SET available_at = now()")
    toy.look()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "early"}
    assert flow.status(run_id) == "completed"


def test_an_answer_for_a_cancelled_run_is_refused_and_changes_nothing(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    before = submit(run_id, "before")
    queue_workflows.cancel_run(run_id)
    toy.look()
    with pytest.raises(errors.InputRefused, match="is cancelled"):
        queue_workflows.submit_input(run_id, "q", "after")
    assert "is cancelled: it takes no answer now" in answer(conn, before)["error"]
    assert (flow.status(run_id), flow.states(run_id)) == (
        "cancelled",
        {"q": "cancelled"},
    )


def test_an_answer_too_large_to_keep_is_refused_in_words(
    toy: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = asked(toy)
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "1")
    submission = submit(run_id, "x" * 2000)
    toy.look()
    row = answer(conn, submission)
    assert row["status"] == "failed"
    assert "MAX_PAYLOAD_KB" in row["error"]
    assert flow.job(run_id, "q")["status"] == "awaiting_input"
    queue_workflows.submit_input(run_id, "q", "short")
    toy.look()
    assert flow.job(run_id, "q")["status"] == "completed"


# --- resume_after_input


def test_resume_after_input_completes_the_node_and_counts_new_rows(
    toy: flow.Flow,
) -> None:
    run_id = asked(toy)
    assert dispatcher.resume_after_input(run_id, "q", "x") == 1
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "x"}
    assert dispatcher.resume_after_input(run_id, "q", "y") == 0
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "x"}


def test_resume_after_input_without_a_value(toy: flow.Flow) -> None:
    run_id = asked(toy)
    assert dispatcher.resume_after_input(run_id, "q") == 1
    assert flow.job(run_id, "q")["context_delta"] == {}


def test_resume_after_input_of_an_unknown_node_is_a_key_error(toy: flow.Flow) -> None:
    run_id = asked(toy)
    with pytest.raises(KeyError, match="has no node 'zzz'"):
        dispatcher.resume_after_input(run_id, "zzz", 1)


def test_resume_after_input_refuses_what_cannot_be_stored_and_the_node_waits_on(
    toy: flow.Flow,
) -> None:
    run_id = asked(toy)
    with pytest.raises(ValueError, match="answer to 'q'"):
        dispatcher.resume_after_input(run_id, "q", {1})
    assert flow.job(run_id, "q")["status"] == "awaiting_input"


def test_an_answer_that_was_taken_counts_even_if_the_run_cannot_go_on_yet(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    conn.execute("UPDATE workflow_runs SET definition = NULL WHERE id = %s", (run_id,))
    flow.forget(run_id)
    config.reset_for_tests()
    assert dispatcher.resume_after_input(run_id, "q", 1) == 0
    assert flow.job(run_id, "q")["status"] == "completed"
    toy.provide()
    toy.look()
    assert flow.states(run_id)["s/a"] == "queued"


# --- the listener, crashes and races


def test_a_listener_of_its_own_takes_answers(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.02")
    run_id = asked(toy)
    listener = input_listener.InputListener()
    listener.start()
    try:
        queue_workflows.submit_input(run_id, "q", 1)
        wait.until(lambda: flow.states(run_id) == {"q": "completed", "s/a": "queued"})
    finally:
        listener.stop()


def test_an_answer_left_processing_for_over_a_minute_is_taken_back(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = asked(toy)
    submission = submit(run_id, "kept")
    left = (
        "UPDATE workflow_input_submissions SET status = 'processing',"
        " claimed_at = now() - %s * interval '1 second' WHERE id = %s"
    )
    conn.execute(left, (59, submission))
    toy.look()
    assert answer(conn, submission)["status"] == "processing"
    conn.execute(left, (61, submission))
    toy.look()
    assert answer(conn, submission)["status"] == "processed"
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "kept"}


class _Crash(BaseException):
    """Stands for the process that dies here."""


@pytest.mark.parametrize("statements", range(1, 6))
def test_a_crash_half_way_loses_no_answer_and_takes_it_once(
    toy: flow.Flow, conn: Any, statements: int
) -> None:
    run_id = asked(toy)
    submission = submit(run_id, "kept")

    class Dying(psycopg.Cursor[Any]):
        left = statements

        def execute(self, *args: Any, **more: Any) -> Any:
            result = super().execute(*args, **more)
            Dying.left -= 1
            if not Dying.left:
                raise _Crash
            return result

    @contextmanager
    def begin() -> Generator[db.Connection]:
        with db.connect() as own, own.transaction():
            own.cursor_factory = Dying
            yield own

    with pytest.raises(_Crash):
        input_listener.InputListener(begin=begin).process_all()
    assert answer(conn, submission)["status"] == "pending"
    assert flow.job(run_id, "q")["status"] == "awaiting_input"
    toy.look()
    assert answer(conn, submission)["status"] == "processed"
    assert flow.states(run_id) == {"q": "completed", "s/a": "queued"}


def test_an_answer_that_the_database_refuses_does_not_hold_up_the_next(
    toy: flow.Flow, conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = asked(toy), asked(toy)
    for run_id in (bad, good):
        submit(run_id, "x")
    conn.execute(
        "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;"
    )
    conn.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON workflow_node_jobs FOR EACH ROW"
        f" WHEN (NEW.status = 'completed' AND NEW.run_id = '{bad}')"
        " EXECUTE FUNCTION pg_temp.refuse()"
    )
    try:
        toy.look()
    finally:
        conn.execute("DROP TRIGGER refuse ON workflow_node_jobs")
    assert (flow.states(bad)["q"], flow.states(good)["q"]) == (
        "awaiting_input",
        "completed",
    )
    row = conn.execute(
        "SELECT *, available_at > now() AS rests FROM workflow_input_submissions WHERE run_id = %s",
        (bad,),
    ).fetchone()
    assert (row["status"], row["rests"]) == ("pending", True)
    assert "not this one" in row["error"]
    conn.execute("UPDATE workflow_input_submissions SET available_at = now()")
    toy.look()
    assert flow.states(bad)["q"] == "completed"


def test_many_listeners_take_each_answer_once(toy: flow.Flow, conn: Any) -> None:
    run_ids = [asked(toy) for _ in range(4)]
    for run_id in run_ids:
        submit(run_id, run_id)
    problems: list[BaseException] = []
    barrier = threading.Barrier(3)

    def listen() -> None:
        listener = input_listener.InputListener()
        barrier.wait(30)
        try:
            listener.process_all()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=listen) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    toy.look()
    assert problems == []
    for run_id in run_ids:
        assert flow.job(run_id, "q")["context_delta"] == {"answer": run_id}
        assert flow.states(run_id)["s/a"] == "queued"
    statuses = factories.column(conn, "SELECT status FROM workflow_input_submissions")
    assert statuses == ["processed"] * 4


def test_a_job_of_the_app_with_odd_inputs_takes_its_answer_too(toy: flow.Flow, conn: Any) -> None:
    run_id = factories.run(conn)
    job = factories.node(conn, run_id, "q", node_module="__input__x", inputs=Jsonb([1]))
    node_queue.mark_awaiting_input(job["id"])
    queue_workflows.submit_input(run_id, "q", 1)
    toy.look()
    assert factories.reread(conn, job)["context_delta"] == {}
