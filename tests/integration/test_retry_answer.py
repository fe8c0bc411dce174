"""`retry`, `answer` and `inputs` in this process, with everything that they refuse."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, errors, input_listener, jobs, node_queue, runs
from tests.support import asgi_service, console, factories, flow, sweeps, tabled
from tests.support.wait import until

OPTIONS = [{"label": "Left", "value": "l"}, {"label": "Right", "value": "r"}]
BLOCKED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock'"
)


pytestmark = pytest.mark.usefixtures("invariants_hold")


def retried(any_id: str, *options: str) -> Any:
    return console.reply("retry", any_id, *options)


def answered(run_id: str, node_id: str, value: Any, *options: str) -> Any:
    return console.reply("answer", run_id, node_id, value, *options)


def listing(*run_id: str) -> Any:
    return console.reply("inputs", *run_id)


def asking(toy: flow.Flow, *, asked: bool = True, **policy: Any) -> str:
    """A run that waits at `q`."""
    question = flow.ask("q", "turnout", prompt="Which way?", turnout_options=OPTIONS, **policy)
    toy.define(question, flow.step("s", depends_on=["q"]), s=flow.nodes(a=""))
    run_id = toy.submit()
    toy.go()
    if not asked:
        with db.connect() as own:
            own.execute("UPDATE workflow_node_jobs SET input_spec = NULL")
    return run_id


def broken_chain(toy: flow.Flow) -> str:
    """A failed run: a completed, b failed, c never came."""
    toy.dag(a="", b="a", c="b")
    run_id = toy.started()
    flow.finish(run_id, "s/a", v=1)
    flow.fail(run_id, "s/b")
    return run_id


# --- retry


def test_retry_keeps_what_is_completed(toy: flow.Flow) -> None:
    run_id = broken_chain(toy)
    done = retried(run_id)
    assert [done[k] for k in ("kind", "outcome", "run_status")] == ["run", "queued", "queued"]
    assert done["nodes"] == {"completed": 1, "failed": 1}
    toy.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "s/a")["context_delta"] == {"v": 1}
    assert {n: j["generation"] for n, j in flow.jobs(run_id).items()} == {
        "s/a": 0, "s/b": 1, "s/c": 1,
    }  # fmt: skip


def test_retry_from_a_node_and_of_a_completed_run(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.submit()
    toy.go()
    refused = retried(run_id)
    assert (refused["outcome"], "--from NODE" in refused["reason"]) == ("refused", True)
    assert retried(run_id, "--from", "s/b")["nodes"] == {"completed": 1, "cancelled": 1}
    toy.go()
    claims = {node_id: job["claim_no"] for node_id, job in flow.jobs(run_id).items()}
    assert (flow.status(run_id), claims) == ("completed", {"s/a": 1, "s/b": 2})


def test_retry_refuses_what_is_not_over_and_writes_nothing(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    run_id = toy.started()
    done = retried(run_id)
    assert (done["outcome"], done["status"]) == ("refused", "running")
    job = retried(flow.job(run_id, "s/a")["id"])
    assert (job["outcome"], job["kind"]) == ("refused", "node job")
    assert "is queued" in job["reason"]
    assert flow.run(run_id)["generation"] == 0
    missing = retried(broken_chain(toy), "--from", "s/zzz")
    assert "has no node 's/zzz'" in missing["reason"]
    close = retried(broken_chain(toy), "--from", "s/aa")
    assert "has no node 's/aa'; did you mean 's/a'?" in close["reason"]


def test_retry_of_a_node_job_takes_its_run_along(toy: flow.Flow) -> None:
    run_id = broken_chain(toy)
    done = retried(flow.job(run_id, "s/b")["id"])
    assert (done["outcome"], done["run_id"], done["run_status"]) == ("queued", run_id, "queued")
    toy.go()
    assert flow.status(run_id) == "completed"


def test_retry_of_an_ingest_job(conn: Any) -> None:
    job = factories.ingest(conn)
    assert "only a failed or cancelled one" in retried(job["id"])["reason"]
    queue_workflows.cancel_job(job["id"])
    assert retried(job["id"])["outcome"] == "queued"
    assert factories.reread(conn, job)["generation"] == 1
    refused = console.refusal("retry", job["id"], "--from", "a")
    assert f"--from a names a node of a run, and {job['id']} is a job" in refused


def test_retry_of_a_job_whose_key_another_one_has_is_refused_as_of_several(conn: Any) -> None:
    queue_workflows.register_ingest_task("t", lambda reason: None)
    keyed: dict[str, Any] = {"queue": "fetch", "idempotency_key": "k", "idempotency_window_s": 0}
    first = jobs.enqueue("t", **keyed)
    node_queue.mark_ingest_failed(first, error="e")
    second = jobs.enqueue("t", **keyed)
    done = retried(first)
    assert (done["outcome"], f"is that of job '{second}'" in done["reason"]) == ("refused", True)


@pytest.mark.parametrize("any_id", ["nope", "", "a'b", "\udcff"])
def test_retry_reports_an_unknown_id(conn: Any, any_id: str) -> None:
    assert retried(any_id)["outcome"] == "unknown"


# --- answers


def test_an_answer_by_label_is_the_options_value(toy: flow.Flow) -> None:
    run_id = asking(toy)
    done = answered(run_id, "q", "Right")
    assert (done["outcome"], done["value"], done["status"]) == ("answered", "r", "awaiting_input")
    assert input_listener.InputListener().process_all() == 1
    toy.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "r"}


@pytest.mark.parametrize("taken", [False, True])
def test_the_second_answer_is_refused_with_the_first(toy: flow.Flow, taken: bool) -> None:
    run_id = asking(toy)
    answered(run_id, "q", "l")
    if taken:
        input_listener.InputListener().process_all()
    later = answered(run_id, "q", "r")
    assert later["outcome"] == "already answered"
    assert later["value"] == ("l" if taken else None)
    assert later["submission_id"] is None
    assert later["reason"].endswith("; the first answer counts")
    input_listener.InputListener().process_all()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "l"}


def test_an_answer_that_waits_for_the_first_one_is_the_second(toy: flow.Flow, conn: Any) -> None:
    run_id = asking(toy)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answered(run_id, "q", "r")))
    with db.transaction() as mine:
        queue_workflows.submit_input(run_id, "q", "l", conn=mine)
        thread.start()
        until(lambda: factories.one(conn, BLOCKED) == 1)
    thread.join(30)
    assert found[0]["outcome"] == "already answered"


def test_an_answer_beside_the_end_of_the_wait_is_refused(toy: flow.Flow, conn: Any) -> None:
    run_id = asking(toy, timeout_s=3600, default="l")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answered(run_id, "q", "r")))
    conn.execute("UPDATE workflow_input_timeouts SET due_at = now() - interval '1 second'")
    with db.transaction() as mine:
        sweeps.expire_inputs(mine)
        thread.start()
        until(lambda: factories.one(conn, BLOCKED) == 1)
    thread.join(30)
    assert (found[0]["outcome"], found[0]["value"]) == ("timed out", "l")
    late = console.command("answer", run_id, "q", "r")
    assert (late.code, 'took the default "l"' in late.err) == (1, True), late.err
    assert "already" not in late.err
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_submissions") == 0


@pytest.mark.parametrize(
    ("value", "policy", "reason"),
    [
        ("abc", {"widget": "number", "$answer_type": "integer"}, "its answer is of type integer"),
        (True, {"widget": "number", "$answer_type": "integer"}, "its answer is of type integer"),
        ("up", {"widget": "turnout", "turnout_options": OPTIONS}, "one of"),
    ],
    ids=["text", "boolean", "no_option"],
)
def test_an_answer_that_does_not_fit_is_a_wrong_request_over_http(
    toy: flow.Flow, value: Any, policy: dict[str, Any], reason: str
) -> None:
    toy.define(flow.ask("q", **policy))
    run_id = toy.submit()
    toy.go()
    reply = asgi_service.post(f"/api/v1/runs/{run_id}/nodes/q/answer", {"value": value})
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:queue-workflows:invalid-answer")
    assert reason in reply.json()["detail"]
    assert flow.states(run_id) == {"q": "awaiting_input"}


def test_a_value_that_does_not_fit_writes_nothing(toy: flow.Flow, conn: Any) -> None:
    run_id = asking(toy)
    assert 'one of "l" (Left), "r" (Right)' in console.refusal("answer", run_id, "q", "up")
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_submissions") == 0
    with pytest.raises(errors.InputRefused, match="one of"):
        queue_workflows.submit_input(run_id, "q", "up", check=True)
    assert answered(run_id, "q", "up", "--unchecked")["outcome"] == "answered"


def test_a_node_without_a_question_yet_takes_only_an_unchecked_answer(
    toy: flow.Flow,
) -> None:
    run_id = asking(toy, asked=False)
    assert "is an orchestrator running" in console.refusal("answer", run_id, "q", "l")
    assert answered(run_id, "q", "l", "--unchecked")["outcome"] == "answered"


def test_a_node_that_does_not_wait_has_its_own_message(toy: flow.Flow) -> None:
    run_id = asking(toy)
    for run, node in (("nope", "q"), (run_id, "\udcff"), ("a'b", "")):
        assert answered(run, node, "1")["outcome"] == "unknown"
    later = answered(run_id, "s/a", "1")
    assert (later["outcome"], "no node 's/a' yet" in later["reason"]) == ("unknown", True)
    runs.cancel(run_id)
    over = answered(run_id, "q", "l")
    assert (over["outcome"], over["status"]) == ("not waiting", "cancelled")


def test_a_node_that_is_no_input_node_takes_no_answer(toy: flow.Flow) -> None:
    toy.dag(a="")
    assert answered(toy.started(), "s/a", "1")["outcome"] == "not waiting"


def test_an_answer_is_a_text_where_the_question_asks_for_one(toy: flow.Flow) -> None:
    cases: list[Any] = [
        ("string", "2026", "2026"), ("string", "true", "true"), ("string", '"2026"', "2026"),
        ("string", "null", None), ("integer", "2026", 2026), ("integer", '"5"', "5"),
    ]  # fmt: skip
    for options in ((), ("--unchecked",)):
        for named, typed, value in cases:
            with tabled.case(named, typed, value, options):
                toy.define(flow.ask("q", "title", **{"$answer_type": named}))
                run_id = toy.started()
                toy.go()
                assert answered(run_id, "q", typed, *options)["value"] == value
                input_listener.InputListener().process_all()
                assert flow.status(run_id) == "completed"


def test_python_takes_a_text_that_is_decoded_as_an_insert_does(toy: flow.Flow) -> None:
    five = [{"label": "Five", "value": 5}]
    toy.define(flow.ask("q", "turnout", turnout_options=five, **{"$answer_type": "integer"}))
    run_id = toy.started()
    toy.go()
    with pytest.raises(errors.InputRefused, match="is of type integer"):
        runs.answer(run_id, "q", "five")
    with pytest.raises(errors.InputRefused, match="it is one of 5"):
        runs.answer(run_id, "q", "6", check=True)
    runs.answer(run_id, "q", "5", check=True)
    input_listener.InputListener().process_all()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": 5}


# --- what waits


def test_waiting_inputs_are_listed_with_their_question(toy: flow.Flow) -> None:
    first, second = asking(toy), asking(toy)
    with db.connect() as own:
        own.execute(
            "UPDATE workflow_node_jobs SET started_at = now() - interval '1 hour'"
            " WHERE run_id = %s",
            (second,),
        )
    assert [row["run_id"] for row in listing()] == [second, first]
    (row,) = listing(first)
    assert (row["node_id"], row["widget"], row["prompt"]) == ("q", "turnout", "Which way?")
    assert (row["answered"], row["input_spec"]["turnout_options"]) == (False, OPTIONS)
    answered(first, "q", "l")
    assert [r["answered"] for r in listing(first)] == [True]
    runs.cancel(second)
    assert [r["run_id"] for r in listing()] == [first]
    node_queue.mark_failed(flow.job(first, "q")["id"], error="given up")
    assert listing() == []
