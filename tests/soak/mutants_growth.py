"""Define mutants of graphs that grow and of durable steps: order, bounds, arms, rounds, replays."""

from __future__ import annotations

import re

from queue_workflows.dag import branches, loops
from queue_workflows.db import statements
from tests.soak import fault_plan, growing_workflows
from tests.soak.mutant import Conn, Mutant, edit, replace, rewrite

GROWN = "graphs that grew wrongly"
MAPS = {growing_workflows.MAPS: 24}
GROWS = {growing_workflows.GROWS: 24}


def _open_all(conn: Conn) -> None:
    """Open all items of a map at once."""
    room = re.escape("v_room := v_map.at_once - v_map.open_items + v_closed;")
    edit(conn, "queue_workflows_step_map", (room, "v_room := v_map.total;"))


def _sort_by_key(conn: Conn) -> None:
    """Give the join the results in the order of the keys, not of the source."""
    edit(conn, "queue_workflows_end_map", ("ORDER BY i.position", "ORDER BY i.key"))


def _forget_an_item(conn: Conn) -> None:
    """Count the first item of a map as done before it has ended."""
    counted = re.escape("SET done_items = m.done_items + v_done")
    early = "SET done_items = m.done_items + v_done + (v_map.done_items = 0 AND v_done > 0)::int"
    edit(conn, "queue_workflows_step_map", (counted, early))


def _never_until() -> None:
    """Go on with a loop as long as it may, whatever its condition says."""
    replace(loops, "_holds", lambda *_: False)


def _one_round() -> None:
    """End a loop after its first round, whatever its condition says."""
    replace(loops, "_holds", lambda *_: True)


def _last_arm() -> None:
    """Choose the last arm of a branch, whatever its value is."""
    replace(branches.Choice, "arm_of", lambda choice, _: choice.ends[-1])


def _lose_outputs(conn: Conn) -> None:
    """Complete the node of a child run without the child's output."""
    edit(conn, "queue_workflows_child_ended", (re.escape("coalesce(v_output, '{}')"), "'{}'"))


def _replay_steps() -> None:
    """Run every step again that an earlier claim has recorded."""
    for old, new in (
        (b"SELECT s.state, s.output", b"SELECT NULL::text AS state, s.output"),
        (b"WHERE s.state <> 'done'", b"WHERE true"),
    ):
        rewrite(statements.job_steps.begin, old, new)


def _short_sleeps() -> None:
    """Let each sleep end as soon as its attempt has."""
    rewrite(statements.events.wait, b"%(after_s)s::float8", b"0.2 * %(after_s)s::float8")


MUTANTS = {
    "map-bounds": Mutant(
        "a map opens all its items at once", GROWN, None, _open_all, load=MAPS
    ),
    "map-order": Mutant(
        "a map's results have the order of their keys", GROWN, None, _sort_by_key, load=MAPS
    ),
    "map-ends": Mutant(
        "a map counts its first item twice", GROWN, None, _forget_an_item, load=MAPS
    ),
    "item-arms": Mutant("the branch of an item chooses its last arm", GROWN, _last_arm, load=MAPS),
    "item-rounds": Mutant(
        "the loop of an item ends after its first round", GROWN, _one_round, load=MAPS
    ),
    "loops": Mutant(
        "a loop ignores its condition", "wrong outcomes", _never_until, load=GROWS
    ),
    "children": Mutant(
        "a child run's output does not reach its parent", "wrong outcomes", None, _lose_outputs,
        load=GROWS,
    ),
    "steps": Mutant(
        "a recorded step runs again in the next attempt", "steps that ran again", _replay_steps,
        focus=fault_plan.KILL_EXECUTOR, jobs={"stepped": 36},
    ),
    "sleeps": Mutant(
        "a sleep is over after a fifth of its time", "waits that ended wrongly", _short_sleeps,
        jobs={"waits": 24},
    ),
}  # fmt: skip
