"""Bind the inputs of a pipeline's nodes: values of the step, paths of other nodes, literals.

In a definition the marker `$out` counts only as the single key of a whole input. An app's own value
with that key is stored as `{"$out": {"$value": value}}`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeAlias, TypeGuard, cast

from queue_workflows import errors, refs
from queue_workflows.dag import document_values

OUT = "$out"


Source: TypeAlias = Callable[[str, Mapping[str, Any]], Any]
"""Gives the template of a pipeline node's input in a step: for the prefix of the ids of its nodes,
as `cut/`, and the inputs of the step."""


def parse(text: str, siblings: Collection[str], where: str) -> Source:
    """Return a parsed `from`; raise `InvalidWorkflow` for an unknown form or sibling."""
    text = text.strip()
    if text.startswith("pipeline._implicit(") and text.endswith(")"):
        template = _literal(text[len("pipeline._implicit(") : -1].strip(), where)
        return lambda _, __: template
    if text.startswith("pipeline._siblings(") and text.endswith(")"):
        listed = text[len("pipeline._siblings(") : -1].strip()
        if not (listed.startswith("[") and listed.endswith("]")):
            raise errors.InvalidWorkflow(f"{where}: {text!r} must list its siblings in [ ]")
        chosen = [part.strip().strip("'\"") for part in listed[1:-1].split(",") if part.strip()]
        paths = [document_values.folder(_sibling(name, siblings, where)) for name in chosen]
        return _from_paths(paths, many=True)
    if text.startswith("pipeline."):
        rest = text.removeprefix("pipeline.")
        if not rest or (rest.startswith("_") and "(" in rest):
            raise errors.InvalidWorkflow(
                f"{where}: {text!r} is none of pipeline.<key>, pipeline._implicit(<literal>), "
                "pipeline._siblings([a, b])"
            )
        return from_step(rest)
    sibling, path = _of_sibling(text, siblings)
    folder = document_values.folder(_sibling(sibling, siblings, where))
    below = "" if path is None else f"/{_inside(path, text, where)}"
    return _from_paths([folder + below], many=False)


def from_step(key: str) -> Source:
    """Return the source `pipeline.<key>`: the step's input of that name, None without one."""
    return lambda _, given: as_input(given.get(key))


def _from_paths(paths: list[str], *, many: bool) -> Source:
    """Return the source of paths of siblings, relative to the step's folder."""

    def placed(prefix: str, _: object) -> dict[str, Any]:
        folder = document_values.folder(prefix)
        found = [f"{folder}{path}" for path in paths]
        return {OUT: found if many else found[0]}

    return placed


def _of_sibling(text: str, siblings: Collection[str]) -> tuple[str, str | None]:
    """Return the sibling that a `from` begins with, and the path after its dot, if it has one.

    A sibling's id may have dots itself; the longest one counts.
    """
    longest = document_values.MAX_ID_CHARS
    at = len(text) if len(text) <= longest else text.rfind(".", 0, longest + 1)
    while at > 0 and text[:at] not in siblings:
        at = text.rfind(".", 0, at)
    if at <= 0:
        head, dot, rest = text.partition(".")
        return head, rest if dot else None
    return text[:at], text[at + 1 :] if at < len(text) else None


def _sibling(name: str, siblings: Collection[str], where: str) -> str:
    if name not in siblings:
        raise errors.InvalidWorkflow(f"{where}: 'from' names the unknown sibling {name!r:.120}")
    return name


def _inside(rest: str, text: str, where: str) -> str:
    parts = rest.split("/")
    if any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise errors.InvalidWorkflow(f"{where}: 'from' {text!r} does not stay in its folder")
    return rest


def _literal(text: str, where: str) -> Any:
    """Return the literal as JSON, else as Python, else the text; quoted if it looks like a ref."""
    try:
        found = _parsed(text)
    except (RecursionError, MemoryError) as error:
        raise errors.InvalidWorkflow(f"{where}: the literal is nested too deep") from error
    template = document_values.value(found, where)
    return {"$value": template} if refs.has_refs(template) else as_input(template)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        pass
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text
    try:
        return json.loads(json.dumps(found))  # the keys become texts, as in a stored document
    except (TypeError, ValueError):
        return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def as_input(template: Any) -> Any:
    """Return an app's value as a whole input of a definition, never mistaken for the marker."""
    return {OUT: {"$value": template}} if is_marker(template) else template


def is_marker(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a whole input is the marker, or an app's value with its key."""
    return isinstance(value, dict) and OUT in value


def with_paths(marker: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a marker with each of its paths changed; the marker of an app's value as it is."""
    marked = marker[OUT]
    if isinstance(marked, dict):
        return dict(marker)
    if isinstance(marked, list):
        return {OUT: [change(path) for path in cast("list[str]", marked)]}
    return {OUT: change(marked)}


def bind_paths(template: Mapping[str, Any], out_dir: str | None, *, node_id: str) -> dict[str, Any]:
    """Return a node's inputs with every marker replaced by paths under `out_dir`.

    Raises `InvalidWorkflow` that names the node if it needs a path and the run has no folder.
    """
    return {
        name: _bound(cast("dict[str, Any]", value), out_dir, node_id, name)
        if isinstance(value, dict) and OUT in value
        else value
        for name, value in template.items()
    }


def _bound(marker: dict[str, Any], out_dir: str | None, node_id: str, name: str) -> Any:
    if isinstance(marker[OUT], dict):
        return marker[OUT]["$value"]
    if out_dir is None:
        raise errors.InvalidWorkflow(
            f"node {node_id!r}: input {name!r} is a path under out_dir, and the run has none"
        )
    root = out_dir.rstrip("/")
    return with_paths(marker, lambda path: f"{root}/{path}")[OUT]
