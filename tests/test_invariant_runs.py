"""Invariants 6, 7 and 8 over generated graphs that the real engine runs to their end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import queue_workflows
from queue_workflows import db, node_queue, run_store
from tests.support import flow as flows
from tests.support import invariants
from tests.support.examples import examples

Spec = dict[str, Any]


@st.composite
def graphs(draw: st.DrawFn) -> list[Spec]:
    """Nodes in topological order, each of which works, fails or is skipped."""
    count = draw(st.integers(1, 8))
    members: list[Spec] = []
    for index in range(count):
        names = [f"n{before}" for before in range(index)]
        deps = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
        kind = draw(st.sampled_from(["ok", "ok", "ok", "ok", "skip", "bad"]))
        spec: Spec = {"id": f"n{index}", "node": "bad" if kind == "bad" else "ok"}
        if deps:
            spec["depends_on"] = deps
        if kind == "skip":
            spec["skip_if"] = {"$value": True}
        members.append(spec)
    return members


@pytest.fixture
def flow(db: Any) -> Generator[flows.Flow]:
    made = flows.Flow()

    def bad() -> None:
        raise RuntimeError("bad")

    queue_workflows.register_node("bad", bad)
    yield made
    made.close()


def fails(members: list[Spec]) -> bool:
    """Whether a failing node is ever reached: it depends on no other that fails."""
    by_id = {spec["id"]: spec for spec in members}
    dead: set[str] = set()
    for spec in members:
        if any(dep in dead for dep in spec.get("depends_on", [])):
            dead.add(spec["id"])
        elif by_id[spec["id"]]["node"] == "bad" and "skip_if" not in spec:
            return True
    return False


@settings(
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(members=graphs(), cancel_after=st.one_of(st.none(), st.integers(0, 4)))
def test_every_run_ends_and_no_invariant_is_broken(
    flow: flows.Flow, members: list[Spec], cancel_after: int | None
) -> None:
    flow.dag(*members)
    run_id = flow.submit()
    cancelled = False
    for turn in range(60):
        flow.look()
        if turn == cancel_after:
            cancelled = queue_workflows.cancel_run(run_id) is not None
        flow.work()
        run = run_store.get_run(run_id)
        assert run is not None
        if run["status"] in ("completed", "failed", "cancelled"):
            break
    flow.look()
    expected = "cancelled" if cancelled else "failed" if fails(members) else "completed"
    assert run["status"] == expected, run["error"]
    statuses = {job["node_id"]: job["status"] for job in node_queue.list_jobs_for_run(run_id)}
    if expected == "completed":
        assert len(statuses) == len(members)
        assert set(statuses.values()) <= {"completed", "skipped"}
    assert not {"queued", "running", "awaiting_input"} & set(statuses.values())
    with db.transaction() as conn:
        assert invariants.broken(conn) == []
