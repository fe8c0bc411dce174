"""A value of a documented type comes back as that type by every way in, or is refused at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from psycopg.types.json import Jsonb

from queue_workflows import check, declare, errors, run_store, runs
from queue_workflows.declare import node, workflow
from tests.support import asgi_service, factories, flow, typed_app
from tests.support.typed_app import CASES, GIVEN, NEVER, STORED, taking

VALUES = {key: case.value for key, case in CASES.items()}


@pytest.fixture
def app(db: ModuleType) -> Iterator[flow.Flow]:
    made = flow.Flow()
    declare.install(*typed_app.APP)
    typed_app.received.clear()
    yield made
    made.close()


def got() -> list[dict[str, Any]]:
    """What the node received, with the types of the values."""
    return [{key: (type(v), v) for key, v in each.items()} for each in typed_app.received]


EXPECTED = [{key: (type(value), value) for key, value in VALUES.items()}]


def post(workflow: str, inputs: dict[str, Any]) -> httpx.Response:
    return asgi_service.post("/api/v1/runs", {"workflow": workflow, "inputs": inputs})


def insert(conn: Any, name: str, context: Any) -> str:
    factories.insert(
        conn, "workflow_runs", id="r", workflow_name=name, status="queued", mode="node",
        context=Jsonb(context),
    )  # fmt: skip
    return "r"


def ended(app: flow.Flow, run_id: str) -> str:
    app.go()
    row = run_store.get_run(run_id)
    assert row is not None
    return row["error"] or row["status"]


@pytest.mark.parametrize("inputs", [GIVEN, STORED], ids=["values", "as_stored"])
def test_from_python(app: flow.Flow, inputs: dict[str, Any]) -> None:
    assert ended(app, runs.submit("every", inputs=inputs)["id"]) == "completed"
    assert got() == EXPECTED


def test_over_http(app: flow.Flow) -> None:
    reply = post("every", STORED)
    assert reply.status_code in (200, 201, 202), reply.text
    assert ended(app, reply.json()["id"]) == "completed"
    assert got() == EXPECTED


def test_from_a_plain_insert(app: flow.Flow, conn: Any) -> None:
    assert ended(app, insert(conn, "every", STORED)) == "completed"
    assert got() == EXPECTED


@pytest.mark.parametrize("name", ["between", "above"])
def test_between_nodes_and_runs(app: flow.Flow, name: str) -> None:
    assert ended(app, runs.submit(name)["id"]) == "completed"
    assert got() == EXPECTED


def test_as_items_of_a_map(app: flow.Flow) -> None:
    assert ended(app, runs.submit("mapped")["id"]) == "completed"
    assert typed_app.received == [{"entry": entry} for entry in typed_app.ENTRIES]


@pytest.mark.parametrize("name", NEVER)
def test_an_annotation_of_which_no_input_is_a_value_is_refused(app: flow.Flow, name: str) -> None:
    made = workflow(name="never")(taking({"x": NEVER[name]}, "keep_text('a')"))
    taker = node(name="taker")(taking({"x": NEVER[name]}, "..."))
    declare.install(made, taker)
    calling = workflow(name="calling")(lambda: taker(5))
    entry = [{"name": "x", "from": "pipeline.x"}]
    app.define(flow.step("s", inputs={"x": 5}), s=[{"id": "n", "node": "taker", "inputs": entry}])
    calling.install()
    for report in (check.workflow("never"), check.workflow("calling"), check.workflow("w")):
        (found,) = report.findings
        reason = "cannot be read" if "NotHere" in NEVER[name] else "JSON"
        assert found.level == "error"
        assert "'x': " in found.message
        assert reason in found.message


@dataclasses.dataclass
class Strict:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise LookupError("count is negative")
        if self.count == 0:
            raise SystemExit("no count")


@node(name="strict.count")
def count(strict: Strict) -> int:
    return strict.count


@node(name="strict.counts")
def counts() -> list[dict[str, int]]:
    return [{"count": -1}]


@workflow
def checked(strict: Strict) -> int:
    return count(strict)


@workflow
def parent() -> None:
    checked(counts()[0])  # pyright: ignore[reportArgumentType]


@workflow
def map_of_nodes() -> None:
    count.map(counts(), key="count")  # pyright: ignore[reportArgumentType]


@workflow
def map_of_runs() -> None:
    checked.map(counts(), key="count")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("number", "reason"), [(-1, "LookupError: count is negative"), (0, "SystemExit: no count")]
)
def test_whatever_a_check_of_inputs_raises_refuses_the_run(
    app: flow.Flow, conn: Any, number: int, reason: str
) -> None:
    declare.install(checked, count)
    inputs = {"strict": {"count": number}}
    text = f"inputs of workflow 'checked': 'strict': {reason}"
    with pytest.raises(errors.ArgsRefused) as refused:
        runs.submit("checked", inputs=inputs)
    assert str(refused.value) == text
    reply = post("checked", inputs)
    assert (reply.status_code, reply.json()["detail"]) == (422, text)
    assert ended(app, insert(conn, "checked", inputs)) == text


@pytest.mark.parametrize("name", ["parent", "map_of_nodes", "map_of_runs"])
def test_whatever_a_check_of_inputs_raises_ends_parents_and_maps(app: flow.Flow, name: str) -> None:
    declare.install(checked, count, counts, parent, map_of_nodes, map_of_runs)
    assert "count is negative" in ended(app, runs.submit(name)["id"])


@pytest.mark.parametrize("value", [1.10, [1.5], {"a": 0.1}])
def test_a_number_that_may_have_lost_digits_is_no_decimal(
    app: flow.Flow, conn: Any, value: Any
) -> None:
    kind = {float: "Decimal", list: "list[Decimal]", dict: "dict[str, Decimal]"}[type(value)]
    priced = workflow(name="priced")(taking({"price": kind}, "make()"))
    declare.install(priced)
    with pytest.raises(errors.ArgsRefused, match=r"Decimal, not .*; write it as text"):
        runs.submit("priced", inputs={"price": value})
    assert post("priced", {"price": value}).status_code == 422
    assert "write it as text" in ended(app, insert(conn, "priced", {"price": value}))
