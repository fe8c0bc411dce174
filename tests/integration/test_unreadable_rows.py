"""A job whose stored values no worker can load fails at its first claim, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import (
    claim_worker,
    config,
    db,
    dispatcher,
    errors,
    ingest_executor,
    node_executor,
    node_queue,
)
from queue_workflows.types import Row, Unreadable
from tests.support import factories, flow, rows_before_checks
from tests.support.wait import until

QUEUE = "load"
Worker = claim_worker.ClaimWorker


pytestmark = pytest.mark.usefixtures("invariants_hold")


@pytest.fixture
def ran(conn: db.Connection) -> list[Any]:
    """What the handlers were given; tasks `t` (sync) and `a` (async), node `m`."""
    given: list[Any] = []

    def task(reason: str, args: Row) -> Row:
        given.append(args)
        return {"ok": True}

    async def waiting(reason: str, args: Row) -> Row:
        given.append(args)
        return {"ok": True}

    def node(inputs: Row) -> Row:
        given.append(inputs)
        return {"ok": True}

    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("t", task)
    config.register_ingest_task("a", waiting)
    queue_workflows.register_node("m", node)
    return given


@contextmanager
def serving(worker: Worker) -> Generator[list[BaseException]]:
    """The worker's loop on a thread; what leaves it is in the list, which stays empty."""
    left: list[BaseException] = []

    def body() -> None:
        try:
            worker.run_forever()
        except BaseException as error:
            left.append(error)

    thread = threading.Thread(target=body, name="test-worker")
    thread.start()
    try:
        yield left
        assert left == []
        assert thread.is_alive()
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def exits(code: int) -> None:
    raise AssertionError(f"the worker left with {code}")


def single(queue: str) -> Worker:
    return claim_worker.ClaimWorker(queue=queue, host="box", on_exit=exits)


def batches(queue: str) -> Worker:
    return claim_worker.ClaimWorker(queue=queue, host="box", batch=5, on_exit=exits)


FORMS: dict[str, tuple[Callable[[str], Worker], str]] = {
    "single": (single, "t"),
    "batch": (batches, "t"),
    "single, async": (single, "a"),
}
BAD = [
    *(
        (c, value, "cannot be loaded")
        for c in ("args", "headers")
        for value in rows_before_checks.UNREADABLE
    ),
    ("headers", """'"x"'::jsonb""", "headers is a text, not an object"),
    ("headers", "'7'::jsonb", "headers is a number, not an object"),
]


def ingest(conn: db.Connection, job_id: str) -> Row:
    row = conn.execute("SELECT * FROM ingest_jobs WHERE id = %s", (job_id,)).fetchone()
    assert row is not None
    return row


def node(conn: db.Connection, job_id: str) -> Row:
    row = conn.execute("SELECT * FROM workflow_node_jobs WHERE id = %s", (job_id,)).fetchone()
    assert row is not None
    return row


@pytest.mark.parametrize("form", FORMS)
def test_a_job_that_cannot_be_loaded_fails_and_its_neighbours_do_not(
    conn: db.Connection, ran: list[Any], form: str
) -> None:
    make, task = FORMS[form]
    for number, (column, value, _) in enumerate(BAD):
        expression = rows_before_checks.UNREADABLE.get(value, value)
        rows_before_checks.put(
            conn,
            "ingest_jobs",
            id=f"'bad-{number}'",
            task_name=f"'{task}'",
            queue=f"'{QUEUE}'",
            **{"priority": "1", "max_attempts": "5", column: expression},
        )
        factories.ingest(conn, id=f"good-{number}", task_name=task, queue=QUEUE, priority=1)
    with serving(make(QUEUE)):
        until(lambda: all(ended(conn, f"good-{i}") for i in range(len(BAD))), timeout_s=30)
        until(lambda: all(ended(conn, f"bad-{i}") for i in range(len(BAD))))
    for number, (column, _, reason) in enumerate(BAD):
        bad, good = ingest(conn, f"bad-{number}"), ingest(conn, f"good-{number}")
        assert bad["status"] == "failed"
        assert column in bad["error"] and reason in bad["error"], bad["error"]
        assert (bad["attempts"], bad["crash_count"], bad["claim_no"]) == (1, 0, 1)
        # A claim that takes long, on a busy machine, is handed back: no attempt, and no fault.
        assert (good["status"], good["crash_count"], good["attempts"]) == ("completed", 0, 0)
        events = conn.execute(
            "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id",
            (bad["id"],),
        ).fetchall()
        assert [e["event_type"] for e in events] == ["claimed", "failed"]
    assert ran == [{}] * len(BAD)


@pytest.mark.parametrize("form", FORMS)
def test_args_that_are_no_object_reach_the_task(
    conn: db.Connection, ran: list[Any], form: str
) -> None:
    make, task = FORMS[form]
    given: list[Any] = [[1, 2], "text", 5, 0.5, False, None, [], {}]
    for number, value in enumerate(given):
        conn.execute(
            "INSERT INTO ingest_jobs (id, task_name, queue, args) VALUES (%s, %s, %s, %s)",
            (f"job-{number}", task, QUEUE, Jsonb(value)),
        )
    with serving(make(QUEUE)):
        until(lambda: all(ended(conn, f"job-{i}") for i in range(len(given))))
    for number in range(len(given)):
        row = ingest(conn, f"job-{number}")
        assert (row["status"], row["error"], row["result"]) == ("completed", None, {"ok": True})
    assert sorted(ran, key=repr) == sorted(given, key=repr)


def ended(conn: db.Connection, job_id: str) -> bool:
    return ingest(conn, job_id)["status"] in ("completed", "failed")


NODES = [
    (
        "inputs",
        rows_before_checks.DEEP_OBJECT,
        "inputs cannot be loaded: it is nested deeper than 200",
    ),
    ("inputs", rows_before_checks.LONG_NUMBER, "inputs cannot be loaded: Exceeds the limit"),
    ("inputs", "'[1]'::jsonb", "inputs is an array, not an object"),
    ("inputs", """'"x"'::jsonb""", "inputs is a text, not an object"),
    (
        "input_template",
        rows_before_checks.DEEP,
        "input_template cannot be loaded: it is nested deeper",
    ),
    ("input_template", "'7'::jsonb", "input_template is a number, not an object"),
]


@pytest.mark.parametrize(("column", "value", "reason"), NODES)
@pytest.mark.parametrize("module", ["m", "__input__text"])
def test_a_node_that_cannot_be_loaded_fails_with_the_column(
    conn: db.Connection, ran: list[Any], column: str, value: str, reason: str, module: str
) -> None:
    run_id = factories.run(conn)
    rows_before_checks.put(
        conn,
        "workflow_node_jobs",
        id="'bad'",
        run_id=f"'{run_id}'",
        node_id="'bad'",
        node_module=f"'{module}'",
        queue="'cpu'",
        priority="1",
        max_attempts="5",
        **{column: value},
    )
    good = factories.node(conn, node_id="good")["id"]
    with serving(single("cpu")):
        until(lambda: node(conn, good)["status"] == "completed")
    bad = node(conn, "bad")
    assert bad["status"] == "failed"
    assert reason in bad["error"]
    assert (bad["attempts"], bad["crash_count"], bad["claim_no"]) == (1, 0, 1)
    rows = conn.execute("SELECT kind FROM workflow_dispatch_events WHERE job_id = 'bad'").fetchall()
    assert [row["kind"] for row in rows] == ["failed"]


@pytest.mark.parametrize("value", ["'NaN'", "'Infinity'", "'-Infinity'", "-1"])
def test_a_timeout_that_is_no_number_of_seconds_is_none(
    conn: db.Connection, ran: list[Any], value: str
) -> None:
    run_id = factories.run(conn)
    rows_before_checks.put(
        conn,
        "workflow_node_jobs",
        id="'odd'",
        run_id=f"'{run_id}'",
        node_id="'odd'",
        node_module="'m'",
        queue="'cpu'",
        timeout_s=value,
    )
    assert single("cpu").run_once()  # pyright: ignore[reportAttributeAccessIssue]
    assert node(conn, "odd")["status"] == "completed"


@pytest.mark.parametrize("value", rows_before_checks.UNREADABLE)
def test_a_context_that_cannot_be_loaded_fails_the_nodes_that_need_it(
    conn: db.Connection, ran: list[Any], value: str
) -> None:
    run_id = factories.run(conn)
    unreadable = f"jsonb_build_object('big', {rows_before_checks.UNREADABLE[value]})"
    rows_before_checks.change(conn, "workflow_runs", run_id, context=unreadable)
    needs = {"input_template": {"x": {"$from": "big"}}, "ref_heads": ["big"]}
    bad = factories.node(conn, run_id, "bad", max_attempts=5, **needs)["id"]
    good = factories.node(conn, run_id, "good", input_template={"x": 1}, ref_heads=[], priority=1)[
        "id"
    ]
    with serving(single("cpu")):
        until(lambda: node(conn, good)["status"] == "completed")
        until(lambda: node(conn, bad)["status"] == "failed")
    row = node(conn, bad)
    assert (row["attempts"], row["crash_count"]) == (1, 0)
    assert f"run {run_id}: its inputs or outputs under 'big' cannot be read" in row["error"]


def test_a_document_is_split_where_each_of_its_columns_can_be_loaded(
    conn: db.Connection, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_before_checks.load_no_more(monkeypatch, 3000)
    job_id = factories.node(
        conn,
        id='odd "id" \\ \N{SNOWMAN}',
        inputs={"x": "y" * 2000},
        input_template={"x": "z" * 2000},
        ref_heads=[],
    )["id"]
    assert single("cpu").run_once()  # pyright: ignore[reportAttributeAccessIssue]
    assert node(conn, job_id)["status"] == "completed"
    assert ran == [{"x": "y" * 2000}]


@pytest.mark.parametrize("column", ["args", "headers"])
def test_an_app_that_executes_an_unreadable_ingest_job_gets_failed(
    conn: db.Connection, ran: list[Any], column: str
) -> None:
    rows_before_checks.put(
        conn,
        "ingest_jobs",
        **{
            "id": "'bad'",
            "task_name": "'t'",
            "queue": f"'{QUEUE}'",
            column: rows_before_checks.DEEP_OBJECT,
        },
    )
    job = node_queue.claim_next_ingest_job(QUEUE)
    assert job is not None and isinstance(job[column], Unreadable)
    assert ingest_executor.execute_ingest_job(job) == "failed"
    assert f"{column} cannot be loaded" in ingest(conn, "bad")["error"]


@pytest.mark.parametrize("held", ["text", "unreadable", "none"])
def test_an_app_that_executes_a_node_of_any_kind_gets_failed(
    conn: db.Connection, ran: list[Any], held: str
) -> None:
    factories.node(conn)
    job = node_queue.claim_next_cpu_job()
    assert job is not None
    job["inputs"] = {"text": '{"x": 1}', "unreadable": Unreadable("why", b""), "none": {}}[held]
    if held == "none":
        job["node_module"] = None
    assert node_executor.execute_node(job) == "failed"
    error = node(conn, job["id"])["error"]
    said = {"text": "inputs is a text", "unreadable": "inputs cannot be loaded: why"}
    assert said.get(held, "node_module is null, not a text") in error


def test_a_policy_that_cannot_be_loaded_does_not_keep_a_job_from_failing(
    conn: db.Connection, ran: list[Any]
) -> None:
    def fails(reason: str) -> None:
        raise RuntimeError("boom")

    config.register_ingest_task("fails", fails)
    values = [*rows_before_checks.EXTREMES["jsonb"]]
    for number, value in enumerate(values):
        rows_before_checks.put(
            conn,
            "ingest_jobs",
            id=f"'{number}'",
            task_name="'fails'",
            queue=f"'{QUEUE}'",
            policy=value,
        )
    with serving(single(QUEUE)):
        until(lambda: all(ended(conn, str(i)) for i in range(len(values))))
    for number in range(len(values)):
        row = ingest(conn, str(number))
        assert (row["status"], row["error"]) == ("failed", "RuntimeError: boom")


def test_a_worker_that_dispatches_survives_whatever_the_run_holds(
    conn: db.Connection, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow.fail_dispatches(monkeypatch, RecursionError("maximum recursion depth exceeded"))
    jobs = [factories.node(conn)["id"] for _ in range(3)]
    with serving(single("cpu")):
        until(lambda: all(node(conn, each)["status"] == "completed" for each in jobs))


def test_a_connection_of_the_app_raises_where_ours_gives_a_value(conn: db.Connection) -> None:
    """What the engine's loader is for: psycopg's own raises on such a row."""
    with (
        psycopg.connect(conn.info.dsn, autocommit=True) as own,
        pytest.raises((RecursionError, ValueError)),
    ):
        own.execute(f"SELECT {rows_before_checks.LONG_NUMBER}").fetchone()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("attempts", [-(2**31), -1, 40_000, 2**31 - 2])
@pytest.mark.parametrize("module", ["m", "fails"])
def test_attempts_that_the_history_cannot_hold_keep_no_node_from_its_end(
    conn: db.Connection, ran: list[Any], attempts: int, module: str
) -> None:
    def fails() -> None:
        raise errors.Discard("no")

    queue_workflows.register_node("fails", fails)
    run_id = factories.run(conn)
    rows_before_checks.put(
        conn,
        "workflow_node_jobs",
        id="'odd'",
        run_id=f"'{run_id}'",
        node_id="'odd'",
        node_module=f"'{module}'",
        queue="'cpu'",
        attempts=str(attempts),
        max_attempts=str(2**31 - 1),
    )
    assert claim_worker.ClaimWorker(queue="cpu", host="box").run_once()
    row = node(conn, "odd")
    assert row["status"] == ("completed" if module == "m" else "failed"), row["error"]
    assert row["crash_count"] == 0
    if attempts < 2**31 - 2:
        assert row["error"] == (None if module == "m" else "Discard: no")


def test_a_worker_dispatches_past_a_run_whose_context_cannot_be_loaded(
    conn: db.Connection, ran: list[Any]
) -> None:
    first = {"id": "a", "kind": "pipeline", "pipeline": "one"}
    second = first | {"id": "b", "depends_on": ["a"], "inputs": {"x": {"$from": "big.x"}}}
    one = {"nodes": [{"id": "m", "inputs": [{"name": "x", "from": "pipeline.x"}]}]}
    queue_workflows.set_workflow_provider(
        lambda _: {"name": "w", "steps": [first, second]}, lambda _: one
    )
    for value in rows_before_checks.UNREADABLE.values():
        run_id = factories.run(conn, status="queued", context={"big": {"x": 1}}, mode="node")
        dispatcher.start_run(run_id)
        rows_before_checks.change(
            conn, "workflow_runs", run_id, context=f"jsonb_build_object('big', {value})"
        )
    count = len(rows_before_checks.UNREADABLE)
    good = factories.node(conn, priority=200)["id"]
    with serving(single("cpu")):
        until(lambda: node(conn, good)["status"] == "completed")
    done = conn.execute(
        "SELECT count(*) AS n FROM workflow_node_jobs WHERE node_id LIKE 'a%%'"
        " AND status = 'completed'"
    ).fetchone()
    assert done == {"n": count}
