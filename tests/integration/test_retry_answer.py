"""`retry`, `answer` and `inputs` in this process, with everything that they refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db as engine
from queue_workflows import errors, input_listener, node_queue, runs
from queue_workflows.admin import overview
from queue_workflows.cli import answer, retry
from queue_workflows.engine import input_timeouts
from tests.support import factories, flow, invariants
from tests.support.wait import until

OPTIONS = [{"label": "Left", "value": "l"}, {"label": "Right", "value": "r"}]
BLOCKED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock'"
)


@pytest.fixture
def conn(db: ModuleType) -> Iterator[Any]:
    with engine.connect() as conn:
        yield conn
        assert invariants.broken(conn, slack_s=5) == []


@pytest.fixture
def host(conn: Any) -> Iterator[flow.Flow]:
    made = flow.Flow()
    yield made
    made.close()


def asking(host: flow.Flow, *, asked: bool = True) -> str:
    """A run that waits at `q`."""
    question = flow.ask("q", "turnout", prompt="Which way?", turnout_options=OPTIONS)
    host.define(question, flow.step("s", depends_on=["q"]), s=flow.nodes(a=""))
    run_id = host.submit()
    host.go()
    if not asked:
        with engine.connect() as own:
            own.execute("UPDATE workflow_node_jobs SET input_spec = NULL")
    return run_id


def broken_chain(host: flow.Flow) -> str:
    """A failed run: a completed, b failed, c never came."""
    host.dag(a="", b="a", c="b")
    run_id = host.started()
    flow.finish(run_id, "s/a", v=1)
    flow.fail(run_id, "s/b")
    return run_id


# --- retry


def test_retry_keeps_what_is_completed(host: flow.Flow) -> None:
    run_id = broken_chain(host)
    done = retry.retried(run_id)
    assert [done[k] for k in ("kind", "outcome", "run_status")] == ["run", "queued", "queued"]
    assert done["nodes"] == {"completed": 1, "failed": 1}
    host.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "s/a")["context_delta"] == {"v": 1}
    assert {n: j["generation"] for n, j in flow.jobs(run_id).items()} == {
        "s/a": 0, "s/b": 1, "s/c": 1,
    }  # fmt: skip


def test_retry_from_a_node_and_of_a_completed_run(host: flow.Flow) -> None:
    host.dag(a="", b="a")
    run_id = host.submit()
    host.go()
    refused = retry.retried(run_id)
    assert (refused["outcome"], "--from NODE" in refused["reason"]) == ("refused", True)
    assert retry.retried(run_id, from_node="s/b")["nodes"] == {"completed": 1, "cancelled": 1}
    host.go()
    claims = {node_id: job["claim_no"] for node_id, job in flow.jobs(run_id).items()}
    assert (flow.status(run_id), claims) == ("completed", {"s/a": 1, "s/b": 2})


def test_retry_refuses_what_is_not_over_and_writes_nothing(host: flow.Flow, conn: Any) -> None:
    host.dag(a="")
    run_id = host.started()
    done = retry.retried(run_id)
    assert (done["outcome"], done["status"]) == ("refused", "running")
    job = retry.retried(flow.job(run_id, "s/a")["id"])
    assert (job["outcome"], job["kind"]) == ("refused", "node job")
    assert "is queued" in job["reason"]
    assert flow.run(run_id)["generation"] == 0
    missing = retry.retried(broken_chain(host), from_node="s/zzz")
    assert "has no node 's/zzz'" in missing["reason"]


def test_retry_of_a_node_job_takes_its_run_along(host: flow.Flow) -> None:
    run_id = broken_chain(host)
    done = retry.retried(flow.job(run_id, "s/b")["id"])
    assert (done["outcome"], done["run_id"], done["run_status"]) == ("queued", run_id, "queued")
    host.go()
    assert flow.status(run_id) == "completed"


def test_retry_of_an_ingest_job(conn: Any) -> None:
    job = factories.ingest(conn)
    assert "only a failed or cancelled one" in retry.retried(job["id"])["reason"]
    queue_workflows.cancel_job(job["id"])
    assert retry.retried(job["id"])["outcome"] == "queued"
    assert factories.reread(conn, job)["generation"] == 1
    with pytest.raises(errors.InvalidConfig, match=r"--from a: .* is a job"):
        retry.retried(job["id"], from_node="a")


@pytest.mark.parametrize("any_id", ["nope", "", "a'b", "\udcff"])
def test_retry_reports_an_unknown_id(conn: Any, any_id: str) -> None:
    assert retry.retried(any_id)["outcome"] == "unknown"


@pytest.mark.parametrize("family", ["run", "ingest"])
def test_a_retry_joins_the_transaction_it_is_given(host: flow.Flow, conn: Any, family: str) -> None:
    if family == "run":
        any_id, again = broken_chain(host), queue_workflows.retry_run
    else:
        any_id, again = factories.ingest(conn)["id"], queue_workflows.retry_job
        queue_workflows.cancel_job(any_id)
    with engine.connection() as mine:
        assert again(any_id, conn=mine)["status"] == "queued"
        mine.rollback()
    found = overview.find(conn, any_id)
    assert found is not None
    assert found["status"] in ("failed", "cancelled")


# --- answers


def test_an_answer_by_label_is_the_options_value(host: flow.Flow) -> None:
    run_id = asking(host)
    done = answer.answered(run_id, "q", "Right")
    assert (done["outcome"], done["value"], done["status"]) == ("answered", "r", "awaiting_input")
    assert input_listener.InputListener().process_all() == 1
    host.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "r"}


@pytest.mark.parametrize("taken", [False, True])
def test_the_second_answer_is_refused_with_the_first(host: flow.Flow, taken: bool) -> None:
    run_id = asking(host)
    answer.answered(run_id, "q", "l")
    if taken:
        input_listener.InputListener().process_all()
    later = answer.answered(run_id, "q", "r")
    assert later["outcome"] == "already answered"
    assert later["value"] == ("l" if taken else None)
    assert later["submission_id"] is None
    input_listener.InputListener().process_all()
    assert flow.job(run_id, "q")["context_delta"] == {"answer": "l"}


def test_an_answer_that_waits_for_the_first_one_is_the_second(host: flow.Flow, conn: Any) -> None:
    run_id = asking(host)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answer.answered(run_id, "q", "r")))
    with engine.transaction() as mine:
        queue_workflows.submit_input(run_id, "q", "l", conn=mine)
        thread.start()
        until(lambda: factories.one(conn, BLOCKED) == 1)
    thread.join(10)
    assert found[0]["outcome"] == "already answered"


def test_an_answer_beside_the_end_of_the_wait_is_refused(host: flow.Flow, conn: Any) -> None:
    run_id = asking(host)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answer.answered(run_id, "q", "r")))
    job_id = flow.job(run_id, "q")["id"]
    with engine.transaction() as mine:
        # As `lock_overdue` does, which finds no wait of this node.
        mine.execute("SELECT FROM workflow_node_jobs WHERE id = %s FOR UPDATE", (job_id,))
        input_timeouts.time_out(mine, job_id, default='{"answer": "l"}', error="")
        thread.start()
        until(lambda: factories.one(conn, BLOCKED) == 1)
    thread.join(10)
    assert (found[0]["outcome"], found[0]["value"]) == ("already answered", "l")
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_submissions") == 0


def test_a_value_that_does_not_fit_writes_nothing(host: flow.Flow, conn: Any) -> None:
    run_id = asking(host)
    with pytest.raises(errors.InputRefused, match=r'one of "l" \(Left\), "r" \(Right\)'):
        answer.answered(run_id, "q", "up")
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_submissions") == 0
    with pytest.raises(errors.InputRefused, match="one of"):
        queue_workflows.submit_input(run_id, "q", "up", check=True)
    assert answer.answered(run_id, "q", "up", check=False)["outcome"] == "answered"


def test_a_node_without_a_question_yet_takes_only_an_unchecked_answer(
    host: flow.Flow,
) -> None:
    run_id = asking(host, asked=False)
    with pytest.raises(errors.InputRefused, match="is an orchestrator running"):
        answer.answered(run_id, "q", "l")
    assert answer.answered(run_id, "q", "l", check=False)["outcome"] == "answered"


def test_a_node_that_does_not_wait_has_its_own_message(host: flow.Flow) -> None:
    run_id = asking(host)
    for run, node in (("nope", "q"), (run_id, "\udcff"), ("a'b", "")):
        assert answer.answered(run, node, 1)["outcome"] == "unknown"
    later = answer.answered(run_id, "s/a", 1)
    assert (later["outcome"], "no node 's/a' yet" in later["reason"]) == ("unknown", True)
    runs.cancel(run_id)
    over = answer.answered(run_id, "q", "l")
    assert (over["outcome"], over["status"]) == ("not waiting", "cancelled")


def test_a_node_that_is_no_input_node_takes_no_answer(host: flow.Flow) -> None:
    host.dag(a="")
    assert answer.answered(host.started(), "s/a", 1)["outcome"] == "not waiting"


# --- what waits


def test_waiting_inputs_are_listed_with_their_question(host: flow.Flow) -> None:
    first, second = asking(host), asking(host)
    with engine.connect() as own:
        own.execute(
            "UPDATE workflow_node_jobs SET started_at = now() - interval '1 hour'"
            " WHERE run_id = %s",
            (second,),
        )
    assert [row["run_id"] for row in answer.listing()] == [second, first]
    (row,) = answer.listing(first)
    assert (row["node_id"], row["widget"], row["prompt"]) == ("q", "turnout", "Which way?")
    assert (row["answered"], row["input_spec"]["turnout_options"]) == (False, OPTIONS)
    answer.answered(first, "q", "l")
    assert [r["answered"] for r in answer.listing(first)] == [True]
    runs.cancel(second)
    assert [r["run_id"] for r in answer.listing()] == [first]
    node_queue.mark_failed(flow.job(first, "q")["id"], error="given up")
    assert answer.listing() == []
