"""Move a run from its frozen definition to the definition of today's code."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import acts, config, db, errors
from queue_workflows.dag import definition, graph, hooks, payload
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, NodeChange, Row, Upgrade, Who

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAMED = 20
"""The most nodes that a message and the history name."""
_KEY = re.compile(r"\[[^\]]*\]")
_ENDED = ("failed", "cancelled")


def upgrade(run_id: str, *, dry_run: bool, **who: Unpack[Who]) -> Upgrade:
    """Compare a run with today's code and, unless `dry_run`, move it there; see `runs.upgrade`."""
    with db.statement() as conn:
        run = _checked(statements.runs.head(conn, run_id=run_id), run_id)
    # App code never runs in a transaction.
    made = hooks.expand(run)
    nodes = _nodes(made)
    with db.transaction() as conn:
        run = _checked(statements.runs.lock(conn, run_id=run_id), run_id)
        found = _compare(_nodes(statements.runs.definition(conn, run_id=run_id)), nodes)
        movable = set(statements.upgrades.hold_queued(conn, run_id=run_id))
        there = statements.upgrades.nodes(conn, run_id=run_id)
        moves = _moves(found, nodes, there, run["generation"], movable)
        outcome = "same" if not any(found) else "refused" if moves.blocked else "would move"
        if outcome == "refused" and not dry_run:
            more = f" and {len(moves.blocked) - NAMED} more" if len(moves.blocked) > NAMED else ""
            raise errors.UpgradeRefused(
                f"run {run_id!r} stays as it is: nodes that have ended, run or are claimed differ "
                f"in today's code: {', '.join(moves.blocked[:NAMED])}{more}",
                moves.blocked,
            )
        if outcome == "would move" and not dry_run:
            with acts.recorded(conn, "upgrade", ("run", run_id), **who):
                _move(conn, run_id, made, found, moves)
            outcome = "moved"
        unknown = _unknown(conn, nodes, found)
    return Upgrade(
        run_id=run_id, outcome=outcome, blocked=moves.blocked, unknown=unknown, **found._asdict()
    )


def _unknown(conn: db.Connection, nodes: Mapping[str, graph.Node], found: Difference) -> list[str]:
    """Return the new and changed nodes that no live worker may know.

    A worker that is switched off counts as live. A worker that lists no nodes may know any.
    """
    names = [*found.added, *(each["id"] for each in found.changed)]
    missing = {name for name in names if not nodes[name].module.startswith("__")}
    stale_s = config.STALE_WORKER_AFTER_S.read()
    for row in statements.workers.list(conn, stale_s=stale_s, absent=False):
        claim = stored_json.mapping(stored_json.mapping(row["detail"]).get("claim"))
        listed, versions = claim.get("nodes"), stored_json.texts(claim.get("versions"))
        modules = None if listed is None else {*stored_json.texts(listed)}
        for name in [*missing] if row["state"] != "dead" else ():
            node = nodes[name]
            knows = modules is None or node.module in modules
            version_fits = node.version is None or node.version_key in versions
            if node.queue == row["queue"] and knows and version_fits:
                missing.discard(name)
    return [name for name in names if name in missing]


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
    found: Difference,
    moves: Moves,
) -> None:
    statements.upgrades.set_versions(
        conn, run_id=run_id, nodes=[*moves.versions], versions=[*moves.versions.values()]
    )
    change = {
        "added": found.added[:NAMED],
        "removed": found.removed[:NAMED],
        "changed": found.changed[:NAMED],
        "nodes": len(found.added) + len(found.removed) + len(found.changed),
    }
    statements.upgrades.move(
        conn,
        run_id=run_id,
        definition=payload.to_json(made),
        digest=definition.digest(made),
        change=json.dumps(change),
    )
    # The run is queued by now. In a running run, the history would show these nodes as cancelled.
    statements.upgrades.drop_nodes(conn, run_id=run_id, nodes=[*moves.replaced])


class Difference(NamedTuple):
    """The nodes and edges that differ; `cut[]/encode` is a node of each item of the map `cut`."""

    added: list[str]
    removed: list[str]
    changed: list[NodeChange]
    edges_added: list[list[str]]
    edges_removed: list[list[str]]


class Moves(NamedTuple):
    """The steps of a move, with nodes that forbid it, versions to set, and jobs to replace."""

    blocked: list[str]
    versions: dict[str, str | None]
    """The new `required_version` of queued nodes that differ only in the version."""
    replaced: list[str]
    """Nodes whose jobs are deleted. The run's start queues them if they still exist."""


def _compare(before: Mapping[str, graph.Node], after: Mapping[str, graph.Node]) -> Difference:
    """Return how the nodes of two definitions differ."""
    changed = [
        NodeChange(
            id=node_id,
            fields=fields,
            version_before=before[node_id].version,
            version_after=after[node_id].version,
        )
        for node_id in before
        if node_id in after and (fields := _fields(before[node_id], after[node_id]))
    ]
    old, new = _edges(before), _edges(after)
    return Difference(
        [node_id for node_id in after if node_id not in before],
        [node_id for node_id in before if node_id not in after],
        changed,
        [[*edge] for edge in new if edge not in old],
        [[*edge] for edge in old if edge not in new],
    )


def _moves(
    found: Difference,
    nodes: Mapping[str, graph.Node],
    jobs: Iterable[Row],
    generation: int,
    movable: Collection[str],
) -> Moves:
    """Return the steps that move a run with these `jobs` (node_id, status, generation, is_map).

    `movable` are the queued nodes that this transaction has locked. A node that has ended or that
    runs must not differ. A map that is open may differ only in versions of its body.
    """
    fields = {change["id"]: change["fields"] for change in found.changed}
    structural = {*found.added, *found.removed}
    structural |= {node_id for node_id, names in fields.items() if names != ["version"]}
    made = Moves([], {}, [])
    for job in jobs:
        node_id = job["node_id"]
        place = _KEY.sub("[]", node_id)
        differs = place in structural or place in fields
        runs_again = job["status"] in _ENDED and job["generation"] < generation
        if job["is_map"] and job["status"] != "skipped":
            if differs or any(each.startswith(f"{place}[]/") for each in structural):
                made.blocked.append(node_id)
        elif not differs or (runs_again and place in nodes):
            continue
        elif not runs_again and (job["status"] != "queued" or node_id not in movable):
            made.blocked.append(node_id)
        elif place in structural:
            made.replaced.append(node_id)
        else:
            made.versions[node_id] = nodes[place].version_key
    return made


def _nodes(definition: Any) -> dict[str, graph.Node]:
    """Return all nodes of a definition and of maps' bodies, without derived fields."""
    found: dict[str, graph.Node] = {}
    for name, node in graph.walk(graph.read(definition), "[]"):
        choice = node.choice and node.choice._replace(members={})
        found[name] = node._replace(choice=choice)
    return found


def _edges(nodes: Mapping[str, graph.Node]) -> dict[tuple[str, str], None]:
    """Return the dependencies, each before the node that waits for it, in declaration order."""
    found: dict[tuple[str, str], None] = {}
    for name, node in nodes.items():
        prefix = name.removesuffix(node.id)
        found |= {(prefix + dep, name): None for dep in node.deps}
    return found


def _fields(before: graph.Node, after: graph.Node) -> list[str]:
    """Return the names of the fields in which two nodes differ, sorted; not for maps' bodies."""
    if before.map is not None and after.map is not None:
        after = after._replace(map=after.map._replace(body=before.map.body))
    pairs = zip(graph.Node._fields, before, after, strict=True)
    return sorted(name for name, old, new in pairs if old != new)
