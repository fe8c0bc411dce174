"""Random runs with maps end as a slow interpreter says, past crashes, cancels and retries."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import queue_workflows
from queue_workflows import db, node_executor, node_queue, runs
from tests.support import flow, invariants
from tests.support.examples import examples

SETTLED = ("completed", "failed", "cancelled")
SHAPES = ("one", "chain", "leaves", "inner", "child", "decide", "decide", "decide inside")
ACTS = (
    "look", "work", "work", "worker", "crash", "cancel", "retry", "retry item", "retry list",
    "retry node", "resume",
)  # fmt: skip
ARMS = ("x", "y")
AT_MOST = 3


class Broken(Exception):
    """What a bad item raises, and a transaction that is not committed."""


class Case(NamedTuple):
    """A map: the shape of its body, its items, how many are open at once and how many may fail."""

    shape: str
    items: list[dict[str, Any]]
    at_once: int | None
    may_fail: int | float
    inner_may_fail: int
    other: bool
    """Whether the branch of a shape that decides has an arm for every other value."""
    must: bool
    """Whether its loop has to end by `until`."""


def deciding() -> st.SearchStrategy[dict[str, Any]]:
    """Return what an item of a shape that decides has: its arm, its rounds, and where it fails."""
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from([*ARMS, *ARMS, "z"]),
            "rounds": st.integers(1, AT_MOST + 1),
            "breaks": st.sampled_from([None] * 6 + ["act", "arm", "side", 1, 2, 3]),
        }
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    flags = st.fixed_dictionaries({"bad": st.sampled_from([False] * 4 + [True])})
    items: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 5))):
        inner: list[dict[str, Any]] = []
        for at in range(draw(st.integers(0, 3))):
            own = {"key": f"i.{at}", "skip": draw(st.booleans())}
            inner.append({**own, **draw(flags), **draw(deciding())})
        item = {"key": f"k.{number}", "skip": draw(st.booleans()), "inner": inner}
        items.append({**item, **draw(flags), **draw(deciding())})
    return Case(
        draw(st.sampled_from(SHAPES)),
        items,
        draw(st.sampled_from([None, 1, 2])),
        draw(st.sampled_from([0, 1, 0.5, 1.0])),
        draw(st.integers(0, 1)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


# --- the slow interpreter -------------------------------------------------------------------------


def expected(case: Case) -> tuple[str, list[Any], list[str]]:
    """Return the status of the run, the results of its map, and the keys of what failed."""
    results: list[Any] = []
    failed: list[str] = []
    for item in case.items:
        try:
            found = _result(case, item)
        except Broken:
            failed.append(item["key"])
        else:
            results += found
    return _status(case.may_fail, len(case.items), failed), results, failed


def _status(may_fail: float, total: int, failed: list[str]) -> str:
    allowed = int(may_fail * total) if isinstance(may_fail, float) else may_fail
    return "failed" if len(failed) > allowed else "completed"


def _result(case: Case, item: dict[str, Any]) -> list[Any]:
    """Return the item's result in a list, [] for none; raise `Broken` if the item fails."""
    if case.shape == "inner":
        bad = [each["key"] for each in item["inner"] if each["bad"]]
        if _status(case.inner_may_fail, len(item["inner"]), bad) == "failed":
            raise Broken
        return [[each["key"] for each in item["inner"] if not each["bad"]]]
    if case.shape == "decide":
        return [_decided(case, item)]
    if case.shape == "decide inside":
        found: list[Any] = []
        lost: list[str] = []
        for each in item["inner"]:
            try:
                found.append(_decided(case, each))
            except Broken:
                lost.append(each["key"])
        if _status(case.inner_may_fail, len(item["inner"]), lost) == "failed":
            raise Broken
        return [found]
    if item["bad"]:
        raise Broken
    return [] if case.shape == "chain" and item["skip"] else [item["key"]]


def _decided(case: Case, item: dict[str, Any]) -> str:
    """Return the item's key, with its arm and the number of its rounds; raise `Broken`."""
    if item["breaks"] in ("act", "side"):
        raise Broken
    arm = "-" if item["skip"] else item["kind"]
    if (arm == "z" and not case.other) or (arm != "-" and item["breaks"] == "arm"):
        raise Broken
    for number in range(1, AT_MOST + 1):
        if item["breaks"] == number:
            raise Broken
        if item["rounds"] == number:
            return f"{item['key']} {number}"
    if case.must:
        raise Broken
    return f"{item['key']} {AT_MOST}"


# --- the engine -----------------------------------------------------------------------------------


def _takes(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "from": f"pipeline.{name}"} for name in names]


PIPELINES: dict[str, Any] = {
    "list": [{"id": "n", "node": "list"}],
    "one": [{"id": "a", "node": "act", "inputs": _takes("item")}],
    "chain": [
        {"id": "a", "node": "act", "inputs": _takes("item")},
        {
            "id": "b",
            "node": "pass",
            "depends_on": ["a"],
            "inputs": _takes("value"),
            "skip_if": {"$from": "item.skip"},
        },
    ],
    "leaves": [
        {"id": "a", "node": "act", "inputs": _takes("item")},
        {"id": "b", "node": "ok", "skip_if": {"$from": "item.skip"}},
        {"id": "c", "node": "ok"},
    ],
    "arms": [
        {"id": "x1", "node": "arm", "inputs": _takes("item")},
        {"id": "x", "node": "ok", "depends_on": ["x1"]},
        {"id": "y", "node": "arm", "inputs": _takes("item")},
        {"id": "rest", "node": "arm", "inputs": _takes("item")},
    ],
    "arms alone": [
        {"id": "x1", "node": "arm", "inputs": _takes("item")},
        {"id": "x", "node": "ok", "depends_on": ["x1"]},
        {"id": "y", "node": "arm", "inputs": _takes("item")},
    ],
    "round": [
        {"id": "before", "node": "ok"},
        {
            "id": "count",
            "node": "count",
            "depends_on": ["before"],
            "inputs": _takes("item", "state"),
        },
    ],
    "join": [{"id": "n", "node": "pass", "inputs": _takes("value")}],
    "end": [{"id": "n", "node": "end", "inputs": _takes("results", "failed")}],
}


def step_of(case: Case) -> dict[str, Any]:
    """Return the map of a case."""
    made: dict[str, Any] = {
        "id": "m",
        "kind": "map",
        "over": {"$from": "list/n.items"},
        "key": "key",
        "depends_on": ["list"],
        "may_fail": case.may_fail,
    }
    if case.at_once:
        made["at_once"] = case.at_once
    if case.shape == "inner":
        inner = {
            "id": "f",
            "kind": "map",
            "over": {"$from": "film.inner"},
            "key": "key",
            "may_fail": case.inner_may_fail,
            "pipeline": "one",
            "inputs": {"item": {"$from": "item"}},
            "result": {"$from": "a.value"},
        }
        join = flow.step("join", depends_on=["f"], inputs={"value": {"$from": "f.results"}})
        return made | {
            "as": "film",
            "steps": [inner, join],
            "result": {"$from": "join/n.value"},
        }
    inputs: dict[str, Any] = {"item": {"$from": "item"}}
    if case.shape == "decide":
        return made | {"steps": _deciding_steps(case), "result": {"$from": "l.value"}}
    if case.shape == "decide inside":
        own = {"over": {"$from": "film.inner"}, "key": "key", "may_fail": case.inner_may_fail}
        inner = {"id": "f", "kind": "map", **own, "steps": _deciding_steps(case)}
        inner |= {"result": {"$from": "l.value"}}
        return made | {"as": "film", "steps": [inner], "result": {"$from": "f.results"}}
    if case.shape == "child":
        run = {"id": "c", "kind": "run", "workflow": "kid", "inputs": inputs}
        return made | {"steps": [run], "result": {"$from": "c.value"}}
    if case.shape == "chain":
        inputs["value"] = {"$from": "a.value"}
    last = "b" if case.shape == "chain" else "a"
    return made | {
        "pipeline": case.shape,
        "inputs": inputs,
        "result": {"$from": f"{last}.value"},
    }


def _deciding_steps(case: Case) -> list[dict[str, Any]]:
    """Return a node, a branch and a loop one behind the other, and a node beside them."""
    item = {"item": {"$from": "item"}}
    arms: dict[str, Any] = {"on": {"$from": "item.kind"}, "arms": {arm: arm for arm in ARMS}}
    if case.other:
        arms["other"] = "rest"
    rounds = {
        "start": 0,
        "until": {"$from": "l/count.over"},
        "result": "count.n",
        "at_most": AT_MOST,
        "must": case.must,
    }
    return [
        {"id": "a", "kind": "node", "node": "first", "inputs": item},
        {
            **flow.step("b", "arms" if case.other else "arms alone", inputs=item),
            **arms,
            "kind": "branch",
            "depends_on": ["a"],
            "skip_if": {"$from": "item.skip"},
        },
        {
            **flow.step("l", "round", inputs={**item, "state": {"$from": "l"}}),
            **rounds,
            "kind": "loop",
            "depends_on": ["b"],
        },
        {"id": "side", "kind": "node", "node": "side", "inputs": item},
    ]


@contextlib.contextmanager
def crashing() -> Generator[db.Connection]:
    """Open a transaction that does everything and is lost before its commit."""
    with db.transaction() as conn:
        yield conn
        raise Broken


class World:
    """One run of a generated map, and everything that can happen to it."""

    def __init__(self, case: Case, conn: db.Connection) -> None:
        self.case = case
        self.conn = conn
        self.host = flow.Flow()
        self.ran: Counter[str] = Counter()
        self.ends: list[tuple[list[Any], list[str]]] = []
        self.meddled = False
        queue_workflows.register_node("list", lambda: {"items": case.items})
        queue_workflows.register_node("act", self._act)
        queue_workflows.register_node("first", lambda item: self._breaks(item, "act"))
        queue_workflows.register_node("arm", lambda item: self._breaks(item, "arm"))
        queue_workflows.register_node("side", lambda item: self._breaks(item, "side"))
        queue_workflows.register_node("count", self._count)
        queue_workflows.register_node("pass", lambda value: {"value": value})
        queue_workflows.register_node("end", self._end)
        end = flow.step(
            "end",
            depends_on=["m"],
            inputs={"results": {"$from": "m.results"}, "failed": {"$from": "m.failed"}},
        )
        self.host.define(flow.step("list"), step_of(case), end, **PIPELINES)
        kid = flow.step("kid", "one", inputs={"item": {"$from": "item"}})
        self.host.define(kid, name="kid")
        self.host.workflows["kid"]["output"] = {"value": {"$from": "kid/a.value"}}
        self.run_id = self.host.submit()

    def _act(self, item: dict[str, Any]) -> dict[str, Any]:
        self.ran[queue_workflows.current_job().id] += 1
        if item["bad"]:
            raise Broken(item["key"])
        return {"value": item["key"]}

    def _breaks(self, item: dict[str, Any], at: object) -> None:
        self.ran[queue_workflows.current_job().id] += 1
        if item["breaks"] == at:
            raise Broken(item["key"])

    def _count(self, item: dict[str, Any], state: int) -> dict[str, Any]:
        number = state + 1
        self._breaks(item, number)
        value = f"{item['key']} {number}"
        return {"n": number, "over": item["rounds"] == number, "value": value}

    def _end(self, results: list[Any], failed: list[dict[str, Any]]) -> None:
        self.ends.append((results, [each["key"] for each in failed]))

    def do(self, act: str) -> None:
        """One thing happens; every invariant holds after it."""
        if act == "look":
            self.host.look()
        elif act == "work":
            self._work()
        elif act == "worker":
            self.host.work()
        elif act == "crash":
            self._crash()
        else:
            self._meddle(act)
        assert invariants.broken(self.conn, slack_s=5) == []
        self._check_window()

    def _crash(self) -> None:
        with contextlib.suppress(Broken):
            flow.dispatch(self.run_id, begin=crashing)

    def _work(self) -> None:
        job = node_queue.claim_next_cpu_job(host="box")
        if job is not None:
            node_executor.execute_node(job)

    def _meddle(self, act: str) -> None:
        status = flow.status(self.run_id)
        nodes = [*flow.states(self.run_id)]
        items = [node_id for node_id in nodes if "[" in node_id]
        if act == "cancel" and status == "running":
            queue_workflows.cancel_run(self.run_id)
        elif act == "retry" and status in ("failed", "cancelled"):
            queue_workflows.retry_run(self.run_id)
        elif act == "retry item" and status in SETTLED and items:
            node_id = items[len(items) // 2]
            queue_workflows.retry_run(self.run_id, from_node=node_id[: node_id.index("]") + 1])
        elif act == "retry node" and status in SETTLED and items:
            queue_workflows.retry_run(self.run_id, from_node=items[len(items) * 2 // 3])
        elif act == "retry list" and status in SETTLED and "list/n" in nodes:
            queue_workflows.retry_run(self.run_id, from_node="list/n")
        elif act == "resume" and status == "running":
            runs.requeue_running()
        else:
            return
        self.meddled = True

    def _check_window(self) -> None:
        """Check that no more items are open than the map allows."""
        if self.case.at_once is None or self.meddled:
            return
        live = {
            node_id.partition("]")[0]
            for node_id, state in flow.states(self.run_id).items()
            if state in ("queued", "running", "awaiting_input") and "[" in node_id
        }
        assert len(live) <= self.case.at_once, live

    def settle(self) -> None:
        """Everybody does their work, until the run is over."""
        for _ in range(200):
            self.host.look()
            if flow.status(self.run_id) in SETTLED:
                break
            self._work()
        self.host.look()
        assert invariants.broken(self.conn, slack_s=5) == []

    def close(self) -> None:
        self.host.close()


@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), acts=st.lists(st.sampled_from(ACTS), max_size=14))
def test_a_run_with_a_map_ends_as_its_definition_says(
    db: ModuleType, case: Case, acts: list[str]
) -> None:
    with db.connect() as conn:
        world = World(case, conn)
        try:
            for act in acts:
                world.do(act)
            world.settle()
            if flow.status(world.run_id) == "cancelled":
                queue_workflows.retry_run(world.run_id)
                world.settle()
            status, results, failed = expected(case)
            assert flow.status(world.run_id) == status, flow.run(world.run_id)["error"]
            if status == "completed":
                assert world.ends[-1] == (results, failed)
            if not world.meddled:
                assert len(world.ends) == (status == "completed")
                assert set(world.ran.values()) <= {1}
        finally:
            world.close()
            conn.execute("DELETE FROM workflow_runs")
