"""An event of an item costs what it changes, however many items its map has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from queue_workflows import db, node_queue, runs
from tests.support import database, factories, flow, reused_backends

ITEMS = (40, 300)
BODIES = {"one node": flow.nodes(n=""), "a chain": flow.nodes(m="", n="m")}
READ = (
    "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint"
    " FROM pg_stat_xact_user_tables WHERE schemaname = current_schema()"
)


pytestmark = pytest.mark.usefixtures("new_sessions", "invariants_hold", "events_of_others")


@pytest.fixture
def new_sessions(own_database: database.Database) -> Iterator[None]:
    """Plan each statement anew, not as an earlier test's session did with other statistics."""
    with reused_backends.shared.off():
        yield


@pytest.fixture
def events_of_others(conn: db.Connection) -> None:
    """Fill the outbox with events of a run that has ended, and with statistics of them.

    Of a short outbox the planner may read all events, or twenty where one is wanted.
    """
    conn.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, processed_at)"
        " SELECT %s, 'n' || i, 'completed', now() FROM generate_series(1, 5000) i",
        (factories.run(conn, status="completed"),),
    )
    conn.execute("ANALYZE workflow_dispatch_events")


def opened(toy: flow.Flow, body: list[Any], count: int, **more: Any) -> str:
    """Return a run whose map `m` over 0, 1, 2 ... has opened its first two items."""
    mapped = {"id": "m", "kind": "map", "over": {"$from": "list/n.items"}, "at_once": 2}
    own = {"pipeline": "body"} if body and "steps" not in more else {}
    mapped |= {"depends_on": ["list"], **own, **more}
    toy.define(
        flow.step("list", "one"),
        mapped,
        flow.step("end", "one", depends_on=["m"]),
        one=flow.nodes(n=""),
        body=body,
    )
    run_id = toy.started()
    flow.finish(run_id, "list/n", items=list(range(count)))
    return run_id


class Calls:
    """Counts the calls of Python functions in a block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, _frame: object, event: str, _given: object) -> None:
        self.count += event == "call"


def settle(run_id: str, *node_ids: str, calls: Calls | None = None, **delta: Any) -> int:
    """Complete nodes, dispatch all their events at once, and return how many rows that reads."""
    for node_id in node_ids:
        flow.complete(run_id, node_id, **delta)
    with db.connect(autocommit=False) as conn:
        # Of a table that has one page, the planner rightly reads all.
        conn.execute("SET LOCAL enable_seqscan = off")
        with calls or contextlib.nullcontext():
            flow.dispatch_within(conn, run_id)
        read = factories.one(conn, READ)
        conn.commit()
    return read


def rows_read(toy: flow.Flow, body: list[Any], count: int) -> list[int]:
    """Return how many rows the dispatch reads for each of a few batches of events."""
    run_id = opened(toy, body, count)
    found: list[int] = []
    for at in range(0, 6, 2):
        for node in body:
            ids = [f"m[{key}]/{node['id']}" for key in (at, at + 1)]
            found.append(settle(run_id, *ids))
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("statistics", ["none", "of a small map"])
def test_an_event_reads_as_much_in_a_large_map_as_in_a_small_one(
    toy: flow.Flow, body: str, statistics: str
) -> None:
    few = rows_read(toy, BODIES[body], ITEMS[0])
    if statistics != "none":
        with db.connect() as conn:
            conn.execute("ANALYZE")
    many = rows_read(toy, BODIES[body], ITEMS[1])
    assert min(few) > 0
    assert max(many) <= max(few) + 10


def rows_to_end(toy: flow.Flow, count: int) -> int:
    """Return how many rows the dispatch reads that ends a map of so many items."""
    run_id = opened(toy, BODIES["one node"], count, at_once=count)
    read = settle(run_id, *(f"m[{key}]/n" for key in range(count)), value=1)
    assert flow.states(run_id)["m"] == "completed"
    return read


@pytest.mark.parametrize("statistics", ["none", "of another run"])
def test_the_end_of_a_map_reads_as_much_for_each_item_of_a_large_one(
    toy: flow.Flow, statistics: str
) -> None:
    few = rows_to_end(toy, 40)
    if statistics != "none":
        with db.connect() as conn:
            conn.execute("ANALYZE")
    many = rows_to_end(toy, 160)
    assert many / 160 <= few / 40 * 1.2


def rows_of_runs(toy: flow.Flow, count: int, at_once: int = 2) -> list[int]:
    """Return how many rows are read to end the runs of two items, and to open two others."""
    run = {"id": "c", "kind": "run", "workflow": "kid"}
    toy.define(flow.step("kid", "one"), name="kid")
    run_id = opened(toy, [], count, steps=[run], at_once=at_once)
    found: list[int] = []
    for at in range(0, 6, 2):
        ids = [f"m[{key}]/c" for key in (at, at + 1)]
        ends = [flow.job(run_id, node_id)["child_run_id"] for node_id in ids]
        with db.connect(autocommit=False) as conn:
            conn.execute("SET LOCAL enable_seqscan = off")
            conn.execute(
                "UPDATE workflow_runs SET status = 'completed', finished_at = now()"
                " WHERE id = ANY (%s)",
                (ends,),
            )
            flow.dispatch_within(conn, run_id)
            found.append(factories.one(conn, READ))
            conn.commit()
    return found


def test_the_end_of_an_items_run_reads_as_much_in_a_large_map(toy: flow.Flow) -> None:
    few = rows_of_runs(toy, ITEMS[0])
    many = rows_of_runs(toy, ITEMS[1])
    assert min(few) > 0
    assert max(many) <= max(few) + 10
    # Nor does it grow with the items that have runs by now, though one round may read a row again.
    assert min(few[1:]) <= few[0]
    assert min(many[1:]) <= many[0]


@pytest.mark.parametrize("statistics", ["none", "of a small map"])
def test_the_end_of_an_items_run_reads_no_other_item_that_waits(
    toy: flow.Flow, statistics: str
) -> None:
    few = rows_of_runs(toy, 20)
    if statistics != "none":
        with db.connect() as conn:
            conn.execute("ANALYZE")
    many = rows_of_runs(toy, 160, at_once=120)
    assert max(many) <= max(few) + 10


# --- branches and loops in items


def rows_of_rounds(toy: flow.Flow, at_most: int, calls: Calls | None = None) -> list[int]:
    """Return how many rows are read when a round ends, for each of a few rounds of two items."""
    step = flow.step("l", "body") | {
        "kind": "loop",
        "start": {"$from": "item"},
        "until": {"$from": "l.over"},
        "result": "n",
        "at_most": at_most,
    }
    beside = {"id": "o", "kind": "node", "node": "ok"}
    steps = [step, beside, beside | {"id": "end", "depends_on": ["l"]}]
    run_id = opened(toy, flow.nodes(m="", n="m"), 4, steps=steps, result={"$from": "o"})
    found: list[int] = []
    for number in range(1, 6):
        for name in ("m", "n"):
            ids = [f"m[{key}]/l/{name}#{number}" for key in (0, 1)]
            found.append(settle(run_id, *ids, calls=calls, over=False))
    return found


def test_the_end_of_a_round_reads_as_much_in_a_long_loop_as_in_a_short_one(
    toy: flow.Flow,
) -> None:
    short = rows_of_rounds(toy, 10)
    long = rows_of_rounds(toy, 100)
    assert min(short) > 0
    assert max(long) <= max(short) + 10
    # Nor does it grow with the rounds that have ended by now.
    assert max(long[2:]) <= max(long[:2]) + 10


def test_an_event_of_an_item_makes_the_nodes_of_the_rounds_around_it(toy: flow.Flow) -> None:
    short, long = Calls(), Calls()
    rows_of_rounds(toy, 10, short)
    rows_of_rounds(toy, 400, long)
    # Ten batches of events: none makes the 801 nodes of the long loop.
    assert long.count < short.count + 801


# --- an item that has ended is counted no more


def counters(run_id: str) -> tuple[int, int, int, list[str]]:
    """Return how many items of the map are done, failed and open, and which were opened."""
    with db.connect() as conn:
        row = conn.execute(
            "SELECT done_items AS done, failed_items AS failed, open_items AS open"
            "  FROM workflow_run_maps WHERE run_id = %s",
            (run_id,),
        ).fetchone()
    assert row is not None
    keys = [node_id for node_id in flow.states(run_id) if node_id.startswith("m[")]
    return row["done"], row["failed"], row["open"], keys


def test_an_event_that_is_dispatched_twice_counts_its_item_once(toy: flow.Flow) -> None:
    run_id = opened(toy, BODIES["one node"], 5)
    flow.finish(run_id, "m[0]/n")
    seen = counters(run_id)
    assert seen == (1, 0, 2, ["m[0]/n", "m[1]/n", "m[2]/n"])
    with db.connect() as conn:
        conn.execute(
            "UPDATE workflow_dispatch_events SET processed_at = NULL"
            " WHERE run_id = %s AND node_id = 'm[0]/n'",
            (run_id,),
        )
    flow.dispatch(run_id)
    assert counters(run_id) == seen


@pytest.mark.parametrize("first", ["done", "failed"])
@pytest.mark.parametrize("second", ["done", "failed"])
def test_an_item_that_has_ended_stays_as_it_ended(toy: flow.Flow, first: str, second: str) -> None:
    run_id = opened(toy, BODIES["one node"], 5, may_fail=5)
    ends: dict[str, Any] = {"done": (["1"], {}), "failed": ([], {"1": "no"})}
    with db.connect() as conn:
        assert flow.count_items(conn, run_id, "m", *ends[first]) == ["2"]
        assert flow.count_items(conn, run_id, "m", *ends[second]) == []
    done, failed, open_, _ = counters(run_id)
    assert (done, failed, open_) == (int(first == "done"), int(first == "failed"), 2)
    with db.connect() as conn:
        state = "SELECT state, error FROM workflow_map_items WHERE run_id = %s AND key = '1'"
        row = conn.execute(state, (run_id,)).fetchone()
    assert row == {"state": first, "error": "no" if first == "failed" else None}


def test_a_new_generation_opens_no_item_that_is_done(toy: flow.Flow) -> None:
    run_id = opened(toy, BODIES["one node"], 4)
    flow.finish(run_id, "m[0]/n")
    node_queue.mark_failed(flow.job(run_id, "m[1]/n")["id"], error="no")
    flow.dispatch(run_id)
    assert flow.status(run_id) == "failed"
    runs.retry(run_id)
    toy.look()
    assert counters(run_id)[:3] == (1, 0, 2)
    states = flow.states(run_id).items()
    queued = [node_id for node_id, state in states if state == "queued" and "[" in node_id]
    assert sorted(queued) == ["m[1]/n", "m[2]/n"]
