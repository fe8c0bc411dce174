"""Invariants of dispatch over generated runs: what is queued when, the outbox, how runs end."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import queue_workflows
from queue_workflows import db, errors, node_executor, node_queue, runs
from tests.support import flow, invariants
from tests.support.examples import examples

SETTLED = ("completed", "failed", "cancelled")
ACTS = ("look", "work", "work", "worker", "answer", "cancel", "retry", "retry from", "reopen")


class Item(NamedTuple):
    """A step: how it behaves, and the earlier steps that it waits for."""

    kind: str
    behaviour: str
    deps: frozenset[int]
    tail: bool
    """A second node behind the first."""


@st.composite
def graphs(draw: st.DrawFn) -> list[Item]:
    items: list[Item] = []
    for index in range(draw(st.integers(1, 6))):
        earlier = st.integers(0, max(0, index - 1))
        items.append(
            Item(
                draw(st.sampled_from(["node", "node", "node", "input"])),
                draw(st.sampled_from(["ok", "ok", "ok", "skip", "flaky", "broken"])),
                draw(st.frozensets(earlier, max_size=3 if index else 0)),
                draw(st.booleans()),
            )
        )
    return items


class World:
    """One run of a generated graph, and everything that can happen to it."""

    def __init__(self, items: list[Item], conn: db.Connection) -> None:
        self.items = items
        self.conn = conn
        self.host = flow.Flow()
        self.ran: Counter[str] = Counter()
        self.raised: set[str] = set()
        self.noticed = False
        """Whether the orchestrator has polled since a handler raised."""
        self.late: list[str] = []
        """Handlers that ran all the same."""
        self.meddled = False
        queue_workflows.register_node("act", self._act)
        steps = [self._step(index, item) for index, item in enumerate(items)]
        one = [{"id": "n", "node": "act", "inputs": [{"name": "me", "from": "pipeline.me"}]}]
        two = [*one, {"id": "m", "node": "ok", "depends_on": ["n"]}]
        self.host.define(*steps, one=one, two=two)
        self.run_id = self.host.submit()

    def _step(self, index: int, item: Item) -> dict[str, Any]:
        more: dict[str, Any] = {"depends_on": [f"t{dep}" for dep in sorted(item.deps)]}
        if item.behaviour == "skip":
            more["skip_if"] = {"$value": True}
        if item.kind == "input":
            return flow.ask(f"t{index}", **more)
        return flow.step(f"t{index}", "two" if item.tail else "one", inputs={"me": index}, **more)

    def _act(self, me: int) -> dict[str, Any]:
        self.ran[f"t{me}"] += 1
        if self.noticed:
            self.late.append(f"t{me}")
        behaviour = self.items[me].behaviour
        if behaviour == "broken" or (behaviour == "flaky" and self.ran[f"t{me}"] == 1):
            self.raised.add(f"t{me}/n")
            raise ValueError(behaviour)
        return {"me": me}

    def do(self, act: str) -> None:
        """One thing happens; every invariant holds after it."""
        if act == "look":
            self._look()
        elif act == "work":
            self._work()
        elif act == "worker":
            self.host.work()
        elif act == "answer":
            self._answer()
        else:
            self._meddle(act)
        assert invariants.broken(self.conn, slack_s=5) == []

    def _look(self) -> None:
        self.host.look()
        self.noticed = bool(self.raised)

    def _work(self) -> bool:
        job = node_queue.claim_next_cpu_job(host="box")
        if job is None:
            return False
        node_executor.execute_node(job)
        return True

    def _answer(self) -> bool:
        for node_id, state in flow.states(self.run_id).items():
            if state == "awaiting_input":
                try:
                    queue_workflows.submit_input(self.run_id, node_id, node_id)
                except errors.InputRefused:
                    continue
                return True
        return False

    def _meddle(self, act: str) -> None:
        over = flow.status(self.run_id) in SETTLED
        nodes = [*flow.states(self.run_id)]
        if act == "cancel":
            self.meddled |= queue_workflows.cancel_run(self.run_id) is not None
        elif act == "retry" and flow.status(self.run_id) in ("failed", "cancelled"):
            self.meddled = True
            queue_workflows.retry_run(self.run_id)
        elif act == "retry from" and over and nodes:
            self.meddled = True
            queue_workflows.retry_run(self.run_id, from_node=nodes[len(nodes) // 2])
        elif act == "reopen":
            self.meddled |= over
            self.conn.execute(
                "UPDATE workflow_runs SET status = 'queued'"
                " WHERE id = %s AND status IN ('failed', 'cancelled')",
                (self.run_id,),
            )

    def settle(self) -> None:
        """Everybody does their work and answers everything, until the run is over."""
        for _ in range(100):
            self._look()
            if flow.status(self.run_id) in SETTLED:
                break
            self._work()
            self._answer()
        self.host.look()
        assert invariants.broken(self.conn, slack_s=5) == []

    def judge(self) -> None:
        """The end is one of those that the graph allows."""
        status, states = flow.status(self.run_id), flow.states(self.run_id)
        assert status in SETTLED
        assert node_queue.count_unprocessed_dispatch_events() == 0
        assert not {"queued", "running", "awaiting_input"} & {*states.values()}
        bad = {f"t{i}" for i, item in enumerate(self.items) if self._fails(item)}
        if status == "completed":
            self._judge_completed(states)
        elif status == "failed":
            failed = {node for node, state in states.items() if state == "failed"}
            assert failed <= {f"{name}/n" for name in bad}
            assert failed
            assert self.meddled or failed == self.raised
        if not self.meddled:
            assert self.late == []
            assert status == ("failed" if bad else "completed")
            assert {*self.ran.values()} <= {1}

    def _fails(self, item: Item) -> bool:
        return item.kind == "node" and item.behaviour in ("flaky", "broken")

    def _judge_completed(self, states: dict[str, str]) -> None:
        for index, item in enumerate(self.items):
            ids = [f"t{index}"] if item.kind == "input" else [f"t{index}/n", f"t{index}/m"]
            for node_id in ids[: 1 + (item.kind == "node" and item.tail)]:
                assert states[node_id] == ("skipped" if item.behaviour == "skip" else "completed")

    def close(self) -> None:
        runs.cancel(self.run_id)
        self.host.close()


@settings(
    max_examples=examples(20),
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(items=graphs(), acts=st.lists(st.sampled_from(ACTS), max_size=12))
def test_the_invariants_hold_at_every_moment_of_every_run(
    db: ModuleType, items: list[Item], acts: list[str]
) -> None:
    with db.connect() as conn:
        world = World(items, conn)
        try:
            for act in acts:
                world.do(act)
            world.settle()
            world.judge()
        finally:
            world.close()


@settings(
    max_examples=examples(12),
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(items=graphs())
def test_an_undisturbed_run_ends_as_its_graph_requires(db: ModuleType, items: list[Item]) -> None:
    with db.connect() as conn:
        world = World(items, conn)
        try:
            world.settle()
            world.judge()
            # One job between two polls: nothing else runs once the first has failed.
            assert [*flow.states(world.run_id).values()].count("failed") <= 1
        finally:
            world.close()
