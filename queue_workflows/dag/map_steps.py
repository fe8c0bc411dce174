"""Read the settings of a step of kind `map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from queue_workflows import errors, refs
from queue_workflows.dag import document_values

MODULE = "__map__"
"""The module of the node of a map, which waits for its items."""
MAX_DEPTH = 4
"""How deep maps nest. The id of a node has the keys of all items around it."""
MOST_AT_ONCE = 100_000
ITEM = "item"
"""The head of refs to the item, unless the step names another by `as`."""
RESULTS = "results"
"""The key of a map's output under which the results of its items are."""
FAILED = "failed"
"""The key of a map's output under which the items that failed are, `{"key", "error"}` each."""
OUTPUTS = frozenset({RESULTS, "keys", FAILED})
"""All keys of a map's output."""


def read(
    entry: Mapping[str, Any], body: Sequence[Mapping[str, Any]], where: str
) -> tuple[Any, dict[str, Any]]:
    """Return the list as a template, and the definition's entry of a map without its body.

    `{"key", "item", "at_once", "may_fail", "result", "path"}`. Raises `InvalidWorkflow` that starts
    with `where`.
    """
    if entry.get("over") is None:
        raise errors.InvalidWorkflow(
            f'{where}: \'over\' is missing: the list, as {{"$from": "scan/scan.files"}}'
        )
    name = ITEM if entry.get("as") is None else entry["as"]
    item = document_values.identifier({"id": name}, f"{where}: 'as'")
    ids = [node["id"] for node in body]
    if item in ids:
        raise errors.InvalidWorkflow(
            f"{where}: a node of its body has the name {item!r} of the item"
        )
    result, path = _result(entry.get("result"), body, where)
    return document_values.value(entry["over"], f"{where}: 'over'"), {
        "key": document_values.text(entry, "key", where),
        "item": item,
        "at_once": at_once(entry.get("at_once"), where),
        "may_fail": may_fail(entry.get("may_fail"), where),
        "result": result,
        "path": path,
    }


def at_once(given: Any, where: str) -> int | None:
    """Return how many items are open at most; None if it is not given."""
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_AT_ONCE:
        raise errors.InvalidWorkflow(
            f"{where}: 'at_once' is a number of items, 1 to {MOST_AT_ONCE}, not {given!r:.40}"
        )
    return given


def may_fail(given: Any, where: str) -> dict[str, Any]:
    """Return how many items may fail: `{"count": n}`, or of a float `{"share": x}`."""
    if given is None:
        return {"count": 0}
    if isinstance(given, float) and 0 <= given <= 1:
        return {"share": given}
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= 1_000_000_000:
        return {"count": given}
    raise errors.InvalidWorkflow(
        f"{where}: 'may_fail' is a number of items, or a share of them from 0.0 to 1.0, "
        f"not {given!r:.40}"
    )


def _result(given: Any, body: Sequence[Mapping[str, Any]], where: str) -> tuple[str, list[str]]:
    if given is None:
        followed = {dep for node in body for dep in node["deps"]}
        leaves = [node for node in body if node["id"] not in followed]
        if len(leaves) > 1:
            raise errors.InvalidWorkflow(
                f"{where}: {len(leaves)} nodes end its body: name the one whose output is the "
                f'item\'s, as "result": {{"$from": "{leaves[-1]["id"]}"}}'
            )
        return leaves[0]["id"], [RESULTS] if "map" in leaves[0] else []
    path = cast("dict[str, Any]", given).get("$from") if isinstance(given, dict) else None
    if not isinstance(path, str) or len(cast("dict[str, Any]", given)) != 1:
        raise errors.InvalidWorkflow(
            f'{where}: \'result\' is one ref, as {{"$from": "encode.path"}}'
        )
    head, *rest = refs.segments(path)
    if head not in {node["id"] for node in body}:
        raise errors.InvalidWorkflow(f"{where}: 'result': its body has no node {head!r:.120}")
    return head, rest
