"""Render an expanded graph as text: a tree for people, Mermaid for pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from queue_workflows.check import findings
from queue_workflows.cli import output
from queue_workflows.dag import bindings

Nodes = list[dict[str, Any]]
_BRANCHES = {True: ("├─ ", "│  ", "└─ ", "   "), False: ("|- ", "|  ", "`- ", "   ")}
_INPUT = "__input__"


def tree(definition: Mapping[str, Any], needs: Iterable[str], *, unicode: bool) -> Iterator[str]:
    """Return the lines of a tree: steps in order, below each its nodes with their inputs."""
    groups = _groups(definition["nodes"])
    ids = frozenset(node["id"] for node in definition["nodes"])
    count = output.counted(len(definition["nodes"]), "node")
    takes = ", ".join(needs)
    yield output.line(f"{definition['workflow']}: {count}") + (
        f", from the run: {output.line(takes)}" if takes else ""
    )
    branch, down, last, under = _BRANCHES[unicode]
    for position, (step, nodes) in enumerate(groups.items(), start=1):
        final = position == len(groups)
        mark, rail = (last, under) if final else (branch, down)
        if len(nodes) == 1:
            yield f"{mark}{_node_line(nodes[0], nodes[0]['id'])}"
            yield from (f"{rail}   {line}" for line in _details(nodes[0], ids))
            continue
        yield f"{mark}{output.line(step)}"
        for number, node in enumerate(nodes, start=1):
            inner, inner_rail = (last, under) if number == len(nodes) else (branch, down)
            yield f"{rail}{inner}{_node_line(node, node['id'].partition('/')[2])}"
            yield from (f"{rail}{inner_rail}   {line}" for line in _details(node, ids))


def mermaid(definition: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of a Mermaid flowchart: a subgraph per step, an edge per dependency."""
    yield "flowchart TD"
    keys = {node["id"]: f"n{index}" for index, node in enumerate(definition["nodes"])}
    for number, (step, nodes) in enumerate(_groups(definition["nodes"]).items()):
        alone = len(nodes) == 1
        if not alone:
            yield f"    subgraph s{number} [{_quoted(step)}]"
        for node in nodes:
            name = node["id"] if alone else node["id"].partition("/")[2]
            yield f"    {'' if alone else '    '}{keys[node['id']]}{_shape(node, name)}"
        if not alone:
            yield "    end"
    for node in definition["nodes"]:
        for dep in node["deps"]:
            arrow = "-->" if node["skip_if"] is None else "-.->"
            yield f"    {keys[dep]} {arrow} {keys[node['id']]}"


def _groups(nodes: Nodes) -> dict[str, Nodes]:
    found: dict[str, Nodes] = {}
    for node in nodes:
        found.setdefault(node["id"].partition("/")[0], []).append(node)
    return found


def _node_line(node: Mapping[str, Any], name: str) -> str:
    asks = str(node["module"]).startswith(_INPUT)
    words = [output.line(name), "asks a person" if asks else node["queue"]]
    if asks:
        words.append(f"({output.line(str(node['module']).removeprefix(_INPUT))})")
    elif node["module"] != node["id"].rpartition("/")[2]:
        words.append(f"runs {output.line(node['module'])}")
    if node["model"] is not None:
        words.append(f"model {output.line(node['model'])}")
    return "  ".join(words)


def _details(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    """Return what a node waits for, its inputs, its skip condition and its policy."""
    if node["deps"]:
        yield f"after {output.line(findings.listed(node['deps'], 6), 1000)}"
    if node["step"] is None:
        for name, value in node["inputs"].items():
            yield output.line(f"{name} = {_value(value, ids)}", 120)
    elif node["step"].get("prompt"):
        yield output.line(f"prompt: {node['step']['prompt']}", 120)
    if node["skip_if"] is not None:
        yield output.line(f"skipped if {_value(node['skip_if'], ids)}", 120)
    if policy := node.get("policy"):
        said = ", ".join(f"{key} {output.compact(value)}" for key, value in policy.items())
        yield output.line(f"policy: {said}", 120)


def _value(value: Any, ids: frozenset[str]) -> str:
    """Return a short template: a ref by its path, `run.` before the run's own keys; else JSON."""
    if not isinstance(value, dict):
        return output.compact(value)
    record = cast("dict[str, Any]", value)
    if "$value" in record:
        return output.compact(record["$value"])
    if bindings.OUT in record:
        paths = record[bindings.OUT]
        if isinstance(paths, dict):
            return output.compact(cast("dict[str, Any]", paths)["$value"])
        listed = cast("list[str]", paths if isinstance(paths, list) else [paths])
        return ", ".join(f"out_dir/{path}" for path in listed)
    if "$from" in record:
        path = str(record["$from"])
        words = [path if path.partition(".")[0] in ids else f"run.{path}"]
        words += [f"where {output.compact(record['$filter'])}"] if "$filter" in record else []
        words += [f"== {output.compact(record['$eq'])}"] if "$eq" in record else []
        words += [f"!= {output.compact(record['$ne'])}"] if "$ne" in record else []
        return " ".join(words)
    return "{" + ", ".join(f"{key}: {_value(member, ids)}" for key, member in record.items()) + "}"


def _shape(node: Mapping[str, Any], name: str) -> str:
    if str(node["module"]).startswith(_INPUT):
        return f"[/{_quoted(name)}/]"
    if node["queue"] == "gpu":
        words = f"{name} ({node['model']})" if node["model"] else name
        return f"[[{_quoted(words)}]]"
    return f"[{_quoted(name)}]"


def _quoted(text: str) -> str:
    flat = output.line(text)
    escaped = flat.replace("#", "#35;").replace('"', "#quot;")
    return '"' + escaped.replace("<", "#lt;").replace(">", "#gt;") + '"'
