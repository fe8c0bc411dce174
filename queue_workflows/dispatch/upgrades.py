"""Move a run from its frozen definition to the one that today's code gives."""

from __future__ import annotations

import json

from queue_workflows import config, db, errors
from queue_workflows.dag import definition, definition_changes, frozen_definition, payload
from queue_workflows.dispatch import hooks
from queue_workflows.engine import ingest_jobs, runs, upgrades, workers
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row, Upgrade

NAMED = 20
"""Nodes that a message and the history name at most."""


def upgrade(run_id: str, *, dry_run: bool, by: str | None) -> Upgrade:
    """Compare a run with today's code and, unless `dry_run`, move it there; see `runs.upgrade`."""
    with db.statement() as conn:
        run = _checked(runs.head(conn, run_id), run_id)
    # App code never runs in a transaction.
    made = json.loads(payload.encode_definition(hooks.expand(run)))
    with db.transaction() as conn:
        run = _checked(runs.lock(conn, run_id), run_id)
        frozen = runs.definition(conn, run_id)
        frozen_definition.check(frozen)
        found = definition_changes.compare(frozen or {}, made)
        movable = upgrades.hold_queued(conn, run_id)
        moves = definition_changes.moves(
            found, made, upgrades.nodes(conn, run_id), run["generation"], movable
        )
        outcome = "same" if not found else "refused" if moves.blocked else "would move"
        if outcome == "refused" and not dry_run:
            raise errors.UpgradeRefused(_refusal(run_id, moves.blocked), moves.blocked)
        if outcome == "would move" and not dry_run:
            _move(conn, run_id, made, found, moves, by)
            outcome = "moved"
        unknown = _unknown(conn, made, found)
    return Upgrade(
        run_id=run_id,
        outcome=outcome,
        blocked=moves.blocked,
        added=found.added,
        removed=found.removed,
        changed=found.changed,
        edges_added=[list(edge) for edge in found.edges_added],
        edges_removed=[list(edge) for edge in found.edges_removed],
        unknown=unknown,
    )


def _unknown(
    conn: db.Connection, made: JsonDict, found: definition_changes.Difference
) -> list[str]:
    """Return the new and changed nodes that no live worker knows."""
    entries = definition_changes.entries(made)
    names = [*found.added, *(each["id"] for each in found.changed)]
    needed = {
        name: (each.get("queue", "cpu"), each["module"], definition_changes.version_key(each))
        for name in names
        if not (each := entries[name])["module"].startswith("__")
    }
    missing = workers.unknown_nodes(conn, {*needed.values()}, config.STALE_WORKER_AFTER_S.read())
    return [name for name, each in needed.items() if each in missing]


def _checked(run: Row | None, run_id: str) -> Row:
    """Return a run that can be moved; raise for any other one."""
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    if run["status"] in TERMINAL_RUN_STATUSES:
        remedy = "submit it again" if run["status"] == "completed" else "retry it first"
        raise errors.InvalidConfig(
            f"run {run_id!r} is {run['status']}: only a run that is not over is moved; {remedy}"
        )
    if run["mode"] != "node" or not run["has_definition"]:
        raise errors.InvalidConfig(
            f"run {run_id!r} has no frozen graph yet: it takes today's code when it starts"
        )
    return run


def _move(
    conn: db.Connection,
    run_id: str,
    made: JsonDict,
    found: definition_changes.Difference,
    moves: definition_changes.Moves,
    by: str | None,
) -> None:
    if by is not None:
        ingest_jobs.name_actor(conn, by)
    upgrades.set_versions(conn, run_id, moves.versions)
    change = {
        "added": found.added[:NAMED],
        "removed": found.removed[:NAMED],
        "changed": found.changed[:NAMED],
        "nodes": len(found.added) + len(found.removed) + len(found.changed),
    }
    upgrades.move(
        conn,
        run_id,
        definition=payload.encode_definition(made),
        digest=definition.digest(made),
        change=json.dumps(change),
    )
    # The run is queued by now: of a running run the history would call these nodes cancelled.
    upgrades.drop_nodes(conn, run_id, moves.replaced)


def _refusal(run_id: str, blocked: list[str]) -> str:
    named = ", ".join(blocked[:NAMED])
    more = f" and {len(blocked) - NAMED} more" if len(blocked) > NAMED else ""
    return (
        f"run {run_id!r} stays as it is: nodes that have ended, run or are claimed differ in "
        f"today's code: {named}{more}"
    )
