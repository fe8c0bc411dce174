"""Compare a run's frozen definition with another one, and find what keeps it from moving there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

from queue_workflows.types import JsonDict, NodeChange, Row

_KEY = re.compile(r"\[[^\]]*\]")
_OWN = ("map", "version")
_ENDED = ("failed", "cancelled")


class Difference(NamedTuple):
    """The nodes and edges that differ; `cut[]/encode` is a node of each item of the map `cut`."""

    added: list[str]
    removed: list[str]
    changed: list[NodeChange]
    edges_added: list[tuple[str, str]]
    edges_removed: list[tuple[str, str]]

    def __bool__(self) -> bool:
        return any(self)


class Moves(NamedTuple):
    """What moving a run takes: nodes that keep it from that, versions to set, jobs to replace."""

    blocked: list[str]
    versions: dict[str, str | None]
    """The new `required_version` of queued nodes that differ in the version alone."""
    replaced: list[str]
    """Queued nodes whose jobs are deleted; the run's start queues those that are still there."""


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference:
    """Return how two checked definitions differ."""
    before, after = entries(old), entries(new)
    changed = [
        NodeChange(
            id=node_id,
            fields=fields,
            version_before=before[node_id].get("version"),
            version_after=after[node_id].get("version"),
        )
        for node_id in before
        if node_id in after and (fields := _fields(before[node_id], after[node_id]))
    ]
    edges = [
        {(dep, node_id): None for node_id, entry in each.items() for dep in _deps(node_id, entry)}
        for each in (before, after)
    ]
    return Difference(
        [node_id for node_id in after if node_id not in before],
        [node_id for node_id in before if node_id not in after],
        changed,
        [edge for edge in edges[1] if edge not in edges[0]],
        [edge for edge in edges[0] if edge not in edges[1]],
    )


def moves(
    found: Difference,
    new: Mapping[str, Any],
    jobs: Iterable[Row],
    generation: int,
    movable: Collection[str],
) -> Moves:
    """Return what a move of the run's `jobs` takes (node_id, status, generation, is_map).

    `movable`: the queued nodes that nobody can claim meanwhile. A node that has ended or that runs
    must not differ. A map that is open may differ in versions of its body alone.
    """
    fields = {change["id"]: change["fields"] for change in found.changed}
    structural = {*found.added, *found.removed}
    structural |= {node_id for node_id, names in fields.items() if names != ["version"]}
    all_entries = entries(new)
    made = Moves([], {}, [])
    for job in jobs:
        node_id = job["node_id"]
        place = _KEY.sub("[]", node_id)
        differs = place in structural or place in fields
        if job["is_map"] and job["status"] != "skipped":
            if differs or any(each.startswith(f"{place}[]/") for each in structural):
                made.blocked.append(node_id)
        elif not differs or (job["status"] in _ENDED and job["generation"] < generation):
            continue
        elif job["status"] != "queued" or node_id not in movable:
            made.blocked.append(node_id)
        elif place in structural:
            made.replaced.append(node_id)
        else:
            made.versions[node_id] = version_key(all_entries[place])
    return made


def version_key(entry: Mapping[str, Any]) -> str | None:
    """Return the version that a worker needs for a node, `<module>@<version>`; None: any."""
    version = entry.get("version")
    return None if version is None else f"{entry['module']}@{version}"


def entries(definition: Mapping[str, Any]) -> dict[str, JsonDict]:
    """Return the entries of all nodes by id, also of those in the bodies of maps."""
    found: dict[str, JsonDict] = {}

    def add(listed: list[JsonDict], prefix: str) -> None:
        for entry in listed:
            found[prefix + entry["id"]] = entry
            if isinstance(entry.get("map"), dict):
                add(entry["map"]["body"], f"{prefix}{entry['id']}[]/")

    add(cast("list[JsonDict]", definition["nodes"]), "")
    return found


def _deps(node_id: str, entry: Mapping[str, Any]) -> list[str]:
    prefix = node_id[: len(node_id) - len(entry["id"])]
    return [prefix + dep for dep in entry["deps"]]


def _fields(before: JsonDict, after: JsonDict) -> list[str]:
    """Return the names of the fields in which two entries of a node differ, sorted."""
    names = before.keys() | after.keys()
    return sorted(name for name in names if _field(before, name) != _field(after, name))


def _field(entry: JsonDict, name: str) -> Any:
    value = entry.get(name)
    if name == "map" and isinstance(value, dict):
        return {key: member for key, member in value.items() if key != "body"}  # pyright: ignore[reportUnknownVariableType]
    return value
