"""What workers store of the results of declared nodes, and what they offer to them."""

from __future__ import annotations

import asyncio
import datetime
import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

import pytest

import queue_workflows
from queue_workflows import declare
from queue_workflows.declare import OFFERED, node
from tests.support import decorators, flow

Stored = Callable[..., dict[str, Any]]


@pytest.fixture
def stored(toy: flow.Flow, tmp_path: Path) -> Stored:
    """Run a declared node as the step `s` of a workflow; return what is stored of its result."""

    def call(what: declare.Node[..., Any], /, **inputs: Any) -> dict[str, Any]:
        def build() -> None:
            what.options("s")(**inputs)

        declare.install(what, declare.Workflow(build, what.name))
        run_id = toy.started(workflow_name=what.name, out_dir=str(tmp_path))
        toy.go("cpu", "gpu")
        (job,) = flow.jobs(run_id).values()
        assert job["status"] == "completed", job["error"]
        return job["context_delta"]

    return call


def test_dicts_are_stored_as_they_are_and_other_results_by_name(
    stored: Stored, tmp_path: Path
) -> None:
    @node
    def count(text: str) -> dict[str, Any]:
        return {"words": len(text.split()), "parts": []}

    @node(name="media.write")
    def write(words: int, out: Path = OFFERED) -> Path:
        return out / f"{words}.txt"

    @node
    def tell(**said: Any) -> None: ...

    @node(queue="gpu")
    def loose(x: Any = None):
        return {"p": Path(x["p"])}

    assert stored(count, text="a") == {"words": 1, "parts": []}
    assert stored(write, words=1) == {"result": f"{tmp_path}/s/write/1.txt"}
    assert stored(tell, a=1) == {}
    assert stored(loose, x={"p": "q"}) == {"p": "q"}


def test_async_nodes_and_generators_store_what_they_return_by_its_annotation(
    stored: Stored,
) -> None:
    @node
    async def fetched(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    @node
    def counted(n: int) -> Generator[float, None, Path]:
        yield 0.5
        return Path(str(n))

    @node
    def told(n: int) -> Iterator[float]:
        yield n

    @node
    def loosely(n: int):
        yield 0.5
        return {"n": n}

    @node
    async def streamed(n: int) -> AsyncIterator[float]:
        yield 0.5
        queue_workflows.current_job().set_result([n])

    assert stored(fetched, n=1) == {"result": 2}
    assert stored(counted, n=1) == {"result": "1"}
    assert stored(told, n=1) == {}
    assert stored(loosely, n=1) == {"n": 1}
    assert stored(streamed, n=1) == {"result": [1]}


class Length(TypedDict):
    length: Decimal


@node
@decorators.logged
def length(file: Path, out: Path = OFFERED) -> Length:
    assert out.is_dir()
    return {"length": Decimal(len(file.parts))}


@node
@decorators.logged
@functools.cache
def half(of: Decimal) -> Decimal:
    return of / 2


@node
@decorators.logged
async def later(at: datetime.date) -> datetime.date:
    return at


@node
@decorators.logged
def yielding(at: datetime.date) -> Generator[float, None, datetime.date]:
    yield 0.5
    return at


@node
@decorators.collected
def upwards(count: int) -> Iterator[int]:
    yield from range(count)


def test_a_decorated_node_has_the_types_of_what_it_decorates(stored: Stored) -> None:
    day = datetime.date(2026, 3, 1)
    assert stored(length, file="a/b") == {"length": "2"}
    assert stored(half, of=3) == {"result": "1.5"}
    assert stored(later, at=day) == stored(yielding, at=day) == {"result": "2026-03-01"}
    assert stored(upwards, count=2) == {"result": [0, 1]}


def test_what_a_declaration_counts_on_is_offered(stored: Stored) -> None:
    @node
    def every(
        inputs: Any, out: Any, scratch: Any, model_handle: Any, model_load_seconds: Any,
        cancel_event: Any, status_callback: Any,
    ) -> dict[str, Any]:  # fmt: skip
        return {"got": sorted(locals())}

    names = "cancel_event inputs model_handle model_load_seconds out scratch status_callback"
    assert stored(every) == {"got": names.split()}


@pytest.mark.parametrize(
    "value",
    [5, "a", [1, 2], False, {"a": 1}, {}, Path("a/b"), Decimal("1.10"), {"result": 5},
     {"result": {"result": [1]}}, {"result": 5, "$dict": True}, {"result": 1, "$dict": 2, "a": 3}],
)  # fmt: skip
@pytest.mark.parametrize("annotation", [None, Any])
def test_a_result_whose_type_is_not_said_is_passed_on(
    toy: flow.Flow, value: Any, annotation: Any
) -> None:
    def give():
        return value

    if annotation is not None:
        give.__annotations__["return"] = annotation
    got: list[Any] = []
    given = node(name="give")(give)
    took = node(name="take")(lambda one, rest, pair: got.append([one, rest, pair]))

    def passing() -> None:
        made: Any = given()
        took.options(skip_if=made == "never")(made, {"in": made}, made)

    declare.install(given, took, declare.Workflow(passing, "passing"))
    run_id = toy.started(workflow_name="passing")
    toy.go()
    assert flow.run(run_id)["error"] is None
    plain = value if isinstance(value, (dict, list, int)) else str(value)
    assert got == [[plain, {"in": plain}, plain]]
