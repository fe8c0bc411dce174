"""Inputs of runs and nodes that are declared in Python: checked, converted, or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic
import pytest
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import db as database
from queue_workflows import declare, errors, node_queue, run_store, runs
from queue_workflows.declare import node, run_input, workflow
from tests.support import counting_cursor, factories, flow, invariants

DAY = datetime.date(2026, 3, 1)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@dataclasses.dataclass
class Span:
    first: datetime.date
    days: int = 1


class Order(pydantic.BaseModel):
    day: datetime.date
    price: Decimal


received: list[Any] = []


@node
def keep(
    day: datetime.date,
    at: datetime.datetime,
    key: uuid.UUID,
    price: Decimal,
    file: Path,
    span: Span,
    order: Order,
    spans: list[Span],
    least: int = 3,
) -> None:
    received.append([day, at, key, price, file, span, order, spans, least])


AT = datetime.datetime(2026, 3, 1, 10, tzinfo=datetime.timezone.utc)
MADE = {
    "day": DAY, "at": AT, "key": ID, "price": Decimal("1.10"), "file": Path("a/b"),
    "span": Span(DAY), "order": Order(day=DAY, price=Decimal("2.50")), "spans": [Span(DAY, 2)],
}  # fmt: skip


@node
def make() -> dict[str, Any]:
    return MADE


@node
def early(day: datetime.date) -> datetime.date:
    return day - datetime.timedelta(1)


@node
def note(text: str) -> str:
    return text


@node
def identify() -> dict[str, Any]:
    job = queue_workflows.current_job()
    return {
        "id": job.id,
        "run": job.run_id,
        "node": job.node_id,
        "attempt": job.attempt,
        "claim": job.claim,
        "worker": job.worker,
        "key": job.idempotency_key,
    }


@workflow
def who() -> None:
    identify()


@workflow
def passed() -> None:
    made: Any = make()
    keep(**{name: made[name] for name in MADE})


@workflow
def report(day: datetime.date, limit: int) -> None:
    note(text=run_input("label", str))
    early(day)
    note.options("shown")(text=limit)  # type: ignore[arg-type]


@workflow
def constant() -> None:
    early(DAY)


@workflow
def plain() -> None:
    make()


@pytest.fixture
def app(db: ModuleType) -> Iterator[flow.Flow]:
    made = flow.Flow()
    declare.install(keep, make, early, note, identify, who, passed, report, constant, plain)
    received.clear()
    yield made
    made.close()
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []


GOOD = {"day": "2026-03-01", "limit": 5, "label": "x"}
WRONG = [
    ({}, "'day', 'limit' missing"),
    (
        {"dayy": "2026-03-01", "limit": 5},
        "'day' missing; 'dayy' (did you mean 'day'?) unknown; it takes 'day', 'limit', 'label'",
    ),
    (GOOD | {"lable": 1}, "'lable' (did you mean 'label'?) unknown"),
    (GOOD | {"limit": "5"}, "'limit': int, not '5'"),
    (GOOD | {"day": "soon"}, "'day': date, not 'soon'"),
    (GOOD | {"label": 5}, "'label': str, not 5"),
]


def test_the_inputs_of_a_declared_workflow_are_read_once_at_its_start(app: flow.Flow) -> None:
    run_id = runs.submit("report", inputs=GOOD)["id"]
    with database.connect() as counted:
        asked = counting_cursor.Counter(counted)
        assert flow.start_on(counted, run_id) == 3
        assert asked.statements == 3  # it also reads the run, as no check has read it
    queued = factories.execute("SELECT inputs FROM workflow_node_jobs WHERE run_id = %s", run_id)
    assert {"inputs": {"day": "2026-03-01"}} in queued
    assert {"inputs": {"text": "x"}} in queued


# --- inputs of a run


@pytest.mark.parametrize(("context", "words"), WRONG, ids=str)
def test_a_run_with_wrong_inputs_is_refused_before_any_write(
    app: flow.Flow, conn: Any, context: dict[str, Any], words: str
) -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        run_store.insert_run(workflow_name="report", context=context)
    assert str(refused.value).startswith("inputs of workflow 'report': ")
    assert words in str(refused.value)
    with pytest.raises(ValueError, match="inputs of workflow 'report'"):
        asyncio.run(runs.submit_async(workflow_name="report", inputs=context))
    assert factories.one(conn, "SELECT count(*) FROM workflow_runs") == 0


@pytest.mark.parametrize(("context", "words"), WRONG, ids=str)
def test_a_run_inserted_by_sql_fails_at_its_start_with_the_same_message(
    app: flow.Flow, conn: Any, context: dict[str, Any], words: str
) -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        run_store.insert_run(workflow_name="report", context=context)
    factories.insert(
        conn, "workflow_runs", id="r", workflow_name="report", status="queued", mode="node",
        context=Jsonb(context),
    )  # fmt: skip
    app.look()
    row = run_store.get_run("r")
    assert row is not None
    assert (row["status"], row["error"]) == ("failed", str(refused.value))
    assert node_queue.list_jobs_for_run("r") == []


def test_a_run_with_the_right_inputs_starts_and_its_nodes_get_them(
    app: flow.Flow, conn: Any
) -> None:
    given = {"day": DAY, "limit": 5, "label": "x"}
    row = run_store.insert_run(workflow_name="report", context=given)
    assert row["context"] == GOOD
    without = run_store.insert_run(workflow_name="report", context={"day": DAY, "limit": 5})
    assert without["status"] == "queued"
    run_store.delete_run(without["id"])
    app.look()
    jobs = {job["node_id"] for job in node_queue.list_jobs_for_run(row["id"])}
    assert jobs == {"early/early", "note/note", "shown/note"}


def test_a_text_for_an_optional_input_is_known_by_its_type(app: flow.Flow) -> None:
    assert report.accepts_input("label", "123")
    assert not report.accepts_input("label", 123)
    assert report.accepts_input("unknown", 123)


def test_a_workflow_that_takes_nothing_refuses_everything(app: flow.Flow) -> None:
    with pytest.raises(errors.ArgsRefused, match="'x' unknown; it takes nothing"):
        run_store.insert_run(workflow_name="plain", context={"x": 1})
    assert run_store.insert_run(workflow_name="plain")["context"] == {}


def test_workflows_that_declare_no_inputs_take_any(app: flow.Flow) -> None:
    app.dag(a="")
    row = run_store.insert_run(workflow_name="w", context={"whatever": 1})
    other = run_store.insert_run(workflow_name="plain", context={"x": 1}, mode="step")
    app.look()
    assert flow.status(row["id"]) == "running"
    assert other["status"] == "queued"


# --- the job of a node


def test_a_node_of_a_worker_knows_its_job(app: flow.Flow, conn: Any) -> None:
    row = run_store.insert_run(workflow_name="who")
    app.go()
    job = flow.job(row["id"], "identify/identify")
    (claimed,) = conn.execute(
        "SELECT claim_no, worker_id FROM workflow_node_events WHERE event_type = 'claimed'"
    ).fetchall()
    assert job["context_delta"] == {
        "id": job["id"],
        "run": row["id"],
        "node": "identify/identify",
        "attempt": 1,
        "claim": claimed["claim_no"],
        "worker": claimed["worker_id"],
        "key": job["id"],
    }


# --- inputs of a node


def done(app: flow.Flow, name: str, **context: Any) -> dict[str, dict[str, Any]]:
    """The jobs, by node, of a run that was brought to its end."""
    row = run_store.insert_run(workflow_name=name, context=context)
    app.go()
    return {job["node_id"]: job for job in node_queue.list_jobs_for_run(row["id"])}


def test_typed_nodes_get_what_other_nodes_made(app: flow.Flow) -> None:
    jobs = done(app, "passed")
    assert jobs["keep/keep"]["status"] == "completed"
    assert jobs["make/make"]["context_delta"] == {
        "day": "2026-03-01",
        "at": "2026-03-01T10:00:00+00:00",
        "key": str(ID),
        "price": "1.10",
        "file": "a/b",
        "span": {"first": "2026-03-01", "days": 1},
        "order": {"day": "2026-03-01", "price": "2.50"},
        "spans": [{"first": "2026-03-01", "days": 2}],
    }
    assert received == [[*MADE.values(), 3]]


def test_constants_of_a_workflow_are_encoded_as_results_are(app: flow.Flow) -> None:
    jobs = done(app, "constant")
    assert jobs["early/early"]["inputs"] == {"day": "2026-03-01"}
    assert jobs["early/early"]["context_delta"] == {"result": "2026-02-28"}


def test_an_input_of_the_wrong_type_fails_its_node_for_good(app: flow.Flow) -> None:
    jobs = done(app, "report", **GOOD)
    assert jobs["shown/note"]["status"] == "failed"
    assert jobs["shown/note"]["error"] == (
        "ArgsRefused: inputs of node 'shown/note': 'text': str, not 5"
    )


def test_a_handler_that_was_not_declared_gets_its_inputs_as_they_are(app: flow.Flow) -> None:
    def run(day: datetime.date, least: int) -> dict[str, Any]:
        return {"is": [str(day), least]}

    queue_workflows.register_node("loose", run)
    inputs = [{"name": name, "from": f"pipeline.{name}"} for name in ("day", "least")]
    app.define(
        flow.step("s", inputs={"day": "soon", "least": "many"}),
        s=[{"id": "n", "node": "loose", "inputs": inputs}],
    )
    assert done(app, "w")["s/n"]["context_delta"] == {"is": ["soon", "many"]}
