"""A step is done once for each result that is recorded, and never under a lost claim."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, errors, ingest_executor, jobs, node_executor, runs, steps
from tests.support import factories, lost_replies, step_app, transitions
from tests.support.factories import job

Row = dict[str, Any]
FETCH = transitions.who("fetch")
pytestmark = pytest.mark.usefixtures("invariants_hold")


def run(conn: db.Connection, task: Callable[..., Any], **args: Any) -> str:
    """Claim the next job of this task, which is queued if there is none, and run it."""
    queue_workflows.register_ingest_task("t", task)
    if factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'queued'") == 0:
        factories.ingest(conn, args=args, max_attempts=9)
    conn.execute("UPDATE ingest_jobs SET available_at = NULL WHERE status = 'queued'")
    return ingest_executor.execute_ingest_job(transitions.claim_ingest(conn, FETCH))


def recorded(conn: db.Connection) -> list[tuple[Any, ...]]:
    return [
        (row["name"], row["key"], row["state"], row["output"])
        for row in jobs.steps(job(conn)["id"], conn=conn)
    ]


@pytest.mark.parametrize("task", [step_app.two, step_app.two_async], ids=["plain", "async"])
def test_a_later_attempt_gets_recorded_results_and_calls_nothing(
    conn: db.Connection, tmp_path: Path, task: Callable[..., Any]
) -> None:
    folder = str(tmp_path)
    assert run(conn, task, folder=folder) == "failed"
    assert run(conn, task, folder=folder) == "failed"
    (tmp_path / "go").touch()
    assert run(conn, task, folder=folder) == "completed"
    assert sorted(step_app.lines(tmp_path)) == [("b", 1), ("first", 1)]
    assert job(conn)["result"] == {"found": ["first", "b"]}
    assert sorted(recorded(conn)) == [
        ("first", "", "done", '"first"'),
        ("second", "", "done", '"b"'),
    ]


@pytest.mark.parametrize("node", ["node_two", "node_two_async"])
def test_a_node_has_steps_and_a_retry_of_a_completed_one_forgets_them(
    conn: db.Connection, tmp_path: Path, node: str
) -> None:
    step_app.setup()
    row = factories.node(conn, node_module=node, inputs={"folder": str(tmp_path)}, max_attempts=3)
    assert node_executor.execute_node(transitions.claim_node(conn)) == "failed"
    conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
    (tmp_path / "go").touch()
    assert node_executor.execute_node(transitions.claim_node(conn)) == "completed"
    assert sorted(step_app.lines(tmp_path)) == [("b", 1), ("first", 1)]
    assert [step["state"] for step in jobs.steps(row["id"])] == ["done", "done"]
    conn.execute("UPDATE workflow_node_jobs SET status = 'queued', generation = generation + 1")
    assert jobs.steps(row["id"]) == []


def test_the_first_call_returns_what_a_later_attempt_gets(conn: db.Connection) -> None:
    value = {"b": (1, Path("/x")), "a": 1e16}
    seen: list[Any] = []

    def task(reason: str) -> None:
        seen.append(steps.step("odd", lambda: value))
        raise ValueError

    run(conn, task)
    run(conn, task)
    assert seen == [{"b": [1, "/x"], "a": 1e16}] * 2
    assert repr(seen[0]) == repr(seen[1])


def test_a_repeated_name_needs_a_key_and_the_error_names_both(conn: db.Connection) -> None:
    def task(reason: str) -> list[int]:
        for number in (1, 2):
            steps.step("one", int, number, key=number)
        steps.step("load", int, 1)
        return [steps.step("load", int, 1)]

    assert run(conn, task) == "failed"
    assert (
        "step 'load' has been called before in this attempt: give each call a key="
        in (job(conn)["error"])
    )
    assert [row[:3] for row in recorded(conn)] == [
        ("one", "1", "done"),
        ("one", "2", "done"),
        ("load", "", "done"),
    ]


def test_changed_arguments_of_a_recorded_step_are_an_error_that_shows_both(
    conn: db.Connection,
) -> None:
    values = iter([{"x": [1]}, {"x": [2]}, {"x": [1]}])

    def task(reason: str) -> None:
        steps.step("load", lambda value, *, folder: 5, next(values), folder=Path("/a"))
        raise ValueError("after the step")

    run(conn, task)
    run(conn, task)
    text = job(conn)["error"]
    assert 'it had ({"x": [1]}, folder="/a"), and now has ({"x": [2]}, folder="/a")' in text
    assert "--from-step load" in text
    run(conn, task)
    assert job(conn)["error"] == "ValueError: after the step"
    assert recorded(conn) == [("load", "", "done", "5")]


def test_a_step_that_failed_may_have_other_arguments(conn: db.Connection) -> None:
    values = iter(["x", "7"])

    def task(reason: str) -> int:
        return steps.step("load", int, next(values))

    assert run(conn, task) == "failed"
    (row,) = jobs.steps(job(conn)["id"])
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert row["error"].startswith("ValueError: invalid literal")
    assert run(conn, task) == "completed"
    (row,) = jobs.steps(job(conn)["id"])
    assert (row["state"], row["attempts"], row["output"]) == ("done", 2, "7")


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("", {}, "the name of a step must be a printable text of 1 to 100 characters, not ''"),
        ("x" * 101, {}, "the name of a step must be"),
        (7, {}, "the name of a step must be"),
        ("a\nb", {}, "the name of a step must be"),
        ("a\x00b", {}, "the name of a step must be"),
        ("n", {"key": ""}, "'key' must be a whole number or a printable text, not ''"),
        ("n", {"key": "a\nb"}, "'key' must be a whole number or a printable text"),
        ("n", {"key": 1.5}, "'key' must be a whole number or a printable text, not 1.5"),
        ("n", {"key": "\ud800"}, "'key' must be a whole number or a printable text"),
        ("n", {"key": "é" * 501}, "'key' is longer than 1,000 bytes"),
        ("n", {"retries": -1}, "'retries' must be a whole number from 0 to 100, not -1"),
        ("n", {"retries": True}, "'retries' must be a whole number from 0 to 100, not True"),
        ("n", {"retries": 101}, "'retries' must be a whole number from 0 to 100, not 101"),
    ],
)
def test_bad_names_keys_and_retries_are_refused_in_one_line(
    conn: db.Connection, name: Any, more: Row, says: str
) -> None:
    def task(reason: str) -> Any:
        return steps.step(name, int, 1, **more)

    assert run(conn, task) == "failed"
    assert job(conn)["error"].startswith("StepRefused: ")
    assert says in job(conn)["error"]
    assert len(job(conn)["error"].splitlines()) == 1
    assert recorded(conn) == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "result of step 'odd'"),
        ({1, 2}, "result of step 'odd'"),
        ("\x00", "result of step 'odd'"),
        ("x" * 70_000, "more than the 64 KiB of MAX_PAYLOAD_KB"),
    ],
    ids=["nan", "set", "nul", "large"],
)
def test_a_result_that_cannot_be_stored_fails_the_step_without_another_call(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch, value: Any, says: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "64")
    calls: list[int] = []

    def task(reason: str) -> Any:
        return steps.step("odd", lambda: [calls.append(1), value][1], retries=3)

    assert run(conn, task) == "failed"
    assert says in job(conn)["error"]
    assert calls == [1]
    assert [row[2] for row in recorded(conn)] == ["failed"]


def test_retries_call_again_within_the_attempt(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def flaky() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("not yet")
        return "here"

    def task(reason: str) -> str:
        return steps.step("fetch", flaky, retries=2)

    assert run(conn, task) == "completed"
    (row,) = jobs.steps(job(conn)["id"])
    assert (len(calls), row["attempts"], row["state"], job(conn)["attempts"]) == (3, 3, "done", 0)
    assert 0 < pauses[0] < pauses[1] and len(pauses) == 2


@pytest.mark.parametrize("signal", [errors.Retry(), errors.Discard("no"), errors.Snooze(5)])
def test_a_signal_of_the_handler_passes_through_without_a_retry(
    conn: db.Connection, signal: errors.JobSignal
) -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        raise signal

    run(conn, lambda reason: steps.step("stop", stop, retries=5))
    assert calls == [1]


def test_nothing_is_written_under_a_lost_claim(conn: db.Connection) -> None:
    ran: list[str] = []

    def loses(reason: str) -> None:
        steps.step("before", int, 1)
        conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 hour'")
        transitions.reclaim_lapsed(conn, "ingest")
        assert steps.step("before2", ran.append, "called") is None

    assert run(conn, loses) == "skipped"
    assert ran == []
    assert [row[0] for row in recorded(conn)] == ["before"]


def test_a_result_is_not_recorded_if_the_claim_is_lost_meanwhile(conn: db.Connection) -> None:
    caught: list[BaseException] = []

    def lose() -> int:
        conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 hour'")
        transitions.reclaim_lapsed(conn, "ingest")
        return 1

    def task(reason: str) -> None:
        try:
            steps.step("lose", lose)
        except errors.ClaimLost as error:
            caught.append(error)
            raise

    assert run(conn, task) == "skipped"
    assert len(caught) == 1
    assert recorded(conn) == [("lose", "", "running", None)]
    (row,) = jobs.steps(job(conn)["id"])
    assert row["crashes"] == 0, "nobody saw a process die"


def test_crashes_count_to_the_step_that_ran_and_the_poisoned_job_names_it(
    conn: db.Connection,
) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    queue_workflows.register_ingest_task("t", lambda reason: steps.step("deadly", die, key="k"))
    factories.ingest(conn)
    for _ in range(3):
        conn.execute("UPDATE ingest_jobs SET available_at = NULL")
        claimed = transitions.claim_ingest(conn, FETCH)
        ingest_executor.run_task(claimed)
        transitions.charge(conn, claimed, evidence="it died")
    assert job(conn)["status"] == "failed"
    assert job(conn)["error"].startswith("poison: took down 3 workers")
    assert job(conn)["error"].endswith("; in step deadly (key k)")
    (row,) = jobs.steps(job(conn)["id"])
    assert (row["crashes"], row["attempts"]) == (3, 3)


def test_a_step_that_has_ended_is_not_charged(conn: db.Connection) -> None:
    queue_workflows.register_ingest_task("t", lambda reason: steps.step("fine", int, 1))
    factories.ingest(conn)
    claimed = transitions.claim_ingest(conn, FETCH)
    ingest_executor.run_task(claimed)
    transitions.charge(conn, claimed, evidence="it died")
    assert [row["crashes"] for row in jobs.steps(job(conn)["id"])] == [0]


def test_a_retry_keeps_the_steps_or_forgets_those_from_a_name_on(
    conn: db.Connection,
) -> None:
    calls: list[str] = []

    def task(reason: str) -> None:
        for name in ("a", "b", "c"):
            steps.step(name, calls.append, name)
        raise errors.Discard

    run(conn, task)
    job_id = job(conn)["id"]
    jobs.retry(job_id)
    run(conn, task)
    assert calls == ["a", "b", "c"]
    jobs.retry(job_id, from_step="b")
    run(conn, task)
    assert calls == ["a", "b", "c", "b", "c"]
    with pytest.raises(errors.InvalidConfig, match=r"has no step 'x'; its steps: a, b, c"):
        jobs.retry(job_id, from_step="x")
    assert job(conn)["status"] == "failed"


def test_steps_go_with_their_job(conn: db.Connection) -> None:
    run(conn, lambda reason: steps.step("a", int, 1))
    jobs.delete(job(conn)["id"])
    assert factories.one(conn, "SELECT count(*) FROM job_steps") == 0


def test_steps_of_nodes_go_with_their_run(conn: db.Connection, tmp_path: Path) -> None:
    step_app.setup()
    factories.node(conn, node_module="node_two", inputs={"folder": str(tmp_path)})
    node_executor.execute_node(transitions.claim_node(conn))
    assert factories.one(conn, "SELECT count(*) FROM job_steps") == 2
    conn.execute("UPDATE workflow_runs SET status = 'failed'")
    for run_id in factories.column(conn, "SELECT id FROM workflow_runs"):
        runs.delete(run_id)
    assert factories.one(conn, "SELECT count(*) FROM job_steps") == 0


def test_without_a_job_or_a_worker_the_error_says_what_is_missing(db: ModuleType) -> None:
    with pytest.raises(errors.NoCurrentJob):
        steps.step("a", int)


def test_a_recorded_output_that_cannot_be_loaded_fails_the_attempt(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> Any:
        steps.step("a", int, 1)
        raise ValueError("later")

    run(conn, task)
    conn.execute("UPDATE job_steps SET output = %s::jsonb", ["9" * 5_000])
    run(conn, task)
    assert "result of step 'a' cannot be read" in job(conn)["error"]


# --- loops ------------------------------------------------------------------------------------


def test_a_loop_goes_on_at_the_item_that_failed(conn: db.Connection) -> None:
    made: list[str] = []

    def task(reason: str) -> None:
        for name in steps.steps("file", ["a", "b", "c"]):
            made.append(name)
            if made == ["a", "b"]:
                raise ValueError("at b")

    run(conn, task)
    (row,) = jobs.steps(job(conn)["id"])
    assert (row["kind"], row["state"], row["position"]) == ("cursor", "running", 1)
    assert run(conn, task) == "completed"
    assert made == ["a", "b", "b", "c"]
    (row,) = jobs.steps(job(conn)["id"])
    assert (row["state"], row["position"], row["attempts"]) == ("done", 3, 2)


def test_a_loop_that_is_done_yields_nothing(conn: db.Connection) -> None:
    made: list[int] = []

    def task(reason: str) -> None:
        made.extend(steps.steps("n", iter(range(3))))
        raise ValueError

    run(conn, task)
    run(conn, task)
    assert made == [0, 1, 2]


def test_an_async_loop_takes_async_items(conn: db.Connection) -> None:
    made: list[int] = []

    async def items() -> AsyncGenerator[int, None]:
        for number in range(4):
            yield number

    async def task(reason: str) -> None:
        async for number in steps.steps_async("n", items()):
            made.append(number)
            if made == [0, 1, 2]:
                raise ValueError

    run(conn, task)
    assert run(conn, task) == "completed"
    assert made == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (range(3), range(4), "it had range(0, 3), and now has range(0, 4)"),
        (["a", "b"], ["a", "c"], 'it had (["a", "b"]), and now has (["a", "c"])'),
        ({1, 2}, {1, 2, 3}, "it had 2 items, and now has 3 items"),
    ],
)
def test_changed_items_of_a_loop_are_an_error_that_shows_both(
    conn: db.Connection, before: Any, after: Any, says: str
) -> None:
    given = iter([before, after])

    def task(reason: str) -> None:
        for _ in steps.steps("n", next(given)):
            raise ValueError

    run(conn, task)
    run(conn, task)
    assert says in job(conn)["error"]
    assert "--from-step n" in job(conn)["error"]


def test_two_loops_of_one_name_need_a_key(conn: db.Connection) -> None:
    def task(reason: str) -> None:
        assert [*steps.steps("n", [1], key="a"), *steps.steps("n", [2], key="b")] == [1, 2]
        assert [*steps.steps("n", [1]), *steps.steps("n", [1])]

    run(conn, task)
    assert "cursor 'n' has been used before in this attempt" in job(conn)["error"]


def test_cursors_are_stored_under_their_own_claim_alone(conn: db.Connection) -> None:
    queue_workflows.register_ingest_task("t", lambda reason: next(steps.steps("n", range(9))))
    factories.ingest(conn)
    claimed = transitions.claim_ingest(conn, FETCH)
    ingest_executor.run_task(claimed)
    lost = claimed | {"claim_no": 7}
    for held, noted, stored in ((claimed, 4, 4), (lost, 6, 4), (claimed, 5, 5)):
        transitions.store_position(conn, held, "n", noted)
        assert [row["position"] for row in jobs.steps(job(conn)["id"])] == [stored]


# --- outages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", range(4))
def test_a_request_whose_reply_is_lost_is_made_again_and_calls_nothing_twice(
    conn: db.Connection, nth: int, is_after: bool
) -> None:
    calls: list[str] = []

    def task(reason: str) -> None:
        with lost_replies.at_statement("job_steps", nth, executed=is_after) as requests:
            for name in ("a", "b"):
                steps.step(name, calls.append, name)
            assert len(requests) == 5, "two of each step, and one of them again"

    assert run(conn, task) == "completed"
    assert calls == ["a", "b"]
    assert [row[2] for row in recorded(conn)] == ["done", "done"]
