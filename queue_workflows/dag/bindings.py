"""Bind the inputs of a pipeline's nodes: values of the step, paths of other nodes, literals.

In a definition the marker `$out` counts only as the single key of a whole input. An app's own value
with that key is stored as `{"$out": {"$value": value}}`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn, cast

from queue_workflows import errors, refs
from queue_workflows.dag import document_values

OUT = "$out"


class FromStep(NamedTuple):
    """The step's input of that name, `pipeline.<key>`."""

    key: str


class FromPaths(NamedTuple):
    """Paths of siblings, relative to the step's folder; `many` if a list was given."""

    paths: tuple[str, ...]
    many: bool


class Literal(NamedTuple):
    """A template that does not depend on the step."""

    template: Any


Source = FromStep | FromPaths | Literal


def parse(text: str, siblings: Collection[str], where: str) -> Source:
    """Return a parsed `from`; raise `InvalidWorkflow` for an unknown form or sibling."""
    text = text.strip()
    if text.startswith("pipeline._implicit(") and text.endswith(")"):
        return Literal(_literal(text[len("pipeline._implicit(") : -1].strip(), where))
    if text.startswith("pipeline._siblings(") and text.endswith(")"):
        listed = text[len("pipeline._siblings(") : -1].strip()
        if not (listed.startswith("[") and listed.endswith("]")):
            raise errors.InvalidWorkflow(f"{where}: {text!r} must list its siblings in [ ]")
        chosen = [part.strip().strip("'\"") for part in listed[1:-1].split(",") if part.strip()]
        paths = [document_values.folder(_sibling(name, siblings, where)) for name in chosen]
        return FromPaths(tuple(paths), many=True)
    if text.startswith("pipeline."):
        rest = text.removeprefix("pipeline.")
        if not rest or (rest.startswith("_") and "(" in rest):
            raise errors.InvalidWorkflow(
                f"{where}: {text!r} is none of pipeline.<key>, pipeline._implicit(<literal>), "
                "pipeline._siblings([a, b])"
            )
        return FromStep(rest)
    sibling, path = _of_sibling(text, siblings)
    folder = document_values.folder(_sibling(sibling, siblings, where))
    below = "" if path is None else f"/{_inside(path, text, where)}"
    return FromPaths((folder + below,), many=False)


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
    marked = isinstance(template, dict) and OUT in template
    return {OUT: {"$value": cast("Any", template)}} if marked else cast("Any", template)


def path_input(prefix: str, source: FromPaths) -> dict[str, Any]:
    """Return the marker for paths in a definition; `prefix` is the step's, as `cut/`."""
    paths = [f"{document_values.folder(prefix)}{path}" for path in source.paths]
    return {OUT: paths if source.many else paths[0]}


def bind_paths(template: Mapping[str, Any], out_dir: str | None, *, node_id: str) -> dict[str, Any]:
    """Return a node's inputs with every marker replaced by paths under `out_dir`.

    Raises `InvalidWorkflow` that names the node if it needs a path and the run has no folder.
    """
    return {
        name: _bound(cast("dict[str, Any]", value)[OUT], out_dir, node_id, name)
        if isinstance(value, dict) and OUT in value
        else value
        for name, value in template.items()
    }


def _bound(marked: Any, out_dir: str | None, node_id: str, name: str) -> Any:
    if isinstance(marked, dict):
        return cast("dict[str, Any]", marked)["$value"]
    if out_dir is None:
        raise errors.InvalidWorkflow(
            f"node {node_id!r}: input {name!r} is a path under out_dir, and the run has none"
        )
    root = out_dir.rstrip("/")
    if isinstance(marked, list):
        return [f"{root}/{path}" for path in cast("list[str]", marked)]
    return f"{root}/{marked}"
