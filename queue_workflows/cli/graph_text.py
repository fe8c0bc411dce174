"""Render an expanded graph as text: a tree for people, Mermaid for pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from queue_workflows.check import findings
from queue_workflows.cli import output
from queue_workflows.dag import answers, document_values, graph

Nodes = list[dict[str, Any]]
_BRANCHES = {True: ("├─ ", "│  ", "└─ ", "   "), False: ("|- ", "|  ", "`- ", "   ")}


def tree(definition: Mapping[str, Any], needs: Iterable[str], *, unicode: bool) -> Iterator[str]:
    """Return the lines of a tree: steps in order, below each its nodes with their inputs."""
    ids = frozenset(node["id"] for node in definition["nodes"])
    count, takes = output.counted(len(definition["nodes"]), "node"), ", ".join(needs)
    yield output.line(f"{definition['workflow']}: {count}") + (
        f", from the run: {output.line(takes)}" if takes else ""
    )
    groups = _groups(_folded(definition["nodes"]))
    for step, mark, rail in _branches(groups, unicode):
        nodes = groups[step]
        if len(nodes) == 1:
            yield f"{mark}{_node_line(nodes[0], nodes[0]['id'])}"
            yield from (f"{rail}   {line}" for line in _details(nodes[0], ids))
            continue
        yield f"{mark}{output.line(step)}"
        for node, inner, inner_rail in _branches(nodes, unicode):
            yield f"{rail}{inner}{_node_line(node, _short(node))}"
            yield from (f"{rail}{inner_rail}   {line}" for line in _details(node, ids))


def _branches(members: Collection[Any], unicode: bool) -> Iterator[tuple[Any, str, str]]:
    """Return each member with what stands before it and before the lines below it."""
    branch, down, last, under = _BRANCHES[unicode]
    for number, member in enumerate(members, start=1):
        yield (member, last, under) if number == len(members) else (member, branch, down)


def mermaid(definition: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of a Mermaid flowchart: a subgraph per step, an edge per dependency."""
    yield "flowchart TD"
    shown = _folded(definition["nodes"])
    keys = {node["id"]: f"n{index}" for index, node in enumerate(shown)}
    boxes = {step for step, nodes in _groups(shown).items() if len(nodes) > 1}
    yield from (f"    {line}" for line in _flowchart(shown, boxes, keys, "s"))


def _flowchart(
    shown: Nodes, boxes: Collection[str], keys: Mapping[str, str], start: str
) -> Iterator[str]:
    """Return nodes and edges, the nodes of the steps `boxes` in a subgraph each."""
    for number, (step, nodes) in enumerate(_groups(shown).items()):
        boxed = step in boxes
        if boxed:
            yield f"subgraph {start}{number} [{_quoted(step)}]"
        for node in nodes:
            name, key = _short(node) if boxed else node["id"], keys[node["id"]]
            if "map" in node:
                # A map is a subgraph with the nodes of one item.
                yield f"subgraph {key} [{_quoted(node['id'] + ', each item')}]"
                body = _folded(node["map"]["body"])
                inner = {each["id"]: f"{key}_{index}" for index, each in enumerate(body)}
                deciding = {each["arm"] for each in body if each.get("arm")}
                yield from (f"    {line}" for line in _flowchart(body, deciding, inner, f"{key}_s"))
                yield "end"
            else:
                yield f"{'    ' if boxed else ''}{key}{_shape(node, name)}"
        if boxed:
            yield "end"
    choosing = _choosing(shown)
    for node in shown:
        values = choosing.get(node["id"])
        for dep in node["deps"]:
            arrow = "-->" if node["skip_if"] is None and not values else "-.->"
            label = " "
            if values and not dep.startswith(f"{node['arm']}/"):
                label = f"|{_quoted(values)}| "
            yield f"{keys[dep]} {arrow}{label}{keys[node['id']]}"
        if loop := node.get("loop"):
            first = next(each["id"] for each in shown if each.get("arm") == node["id"])
            again = _quoted(f"again, at most {len(loop['rounds'])}")
            yield f"{keys[loop['rounds'][0]['end']]} -.->|{again}| {keys[first]}"


def _folded(nodes: Nodes) -> Nodes:
    """Return the nodes with the first round of each loop in the place of all rounds."""
    loops = {node["id"]: node["loop"] for node in nodes if node.get("loop")}
    firsts = {
        f"{node['id'].rpartition('#')[0]}#{len(loops[node['arm']]['rounds'])}": node["id"]
        for node in nodes
        if node.get("round") == 1
    }
    return [
        node | {"deps": [firsts.get(dep, dep) for dep in node["deps"]]}
        if node.get("loop")
        else node
        for node in nodes
        if (node.get("round") or 1) == 1
    ]


def _short(node: Mapping[str, Any]) -> str:
    """Return a node's id without its step; the id of a node that has its step's."""
    return node["id"].partition("/")[2] or node["id"]


def _choosing(nodes: Nodes) -> dict[str, str]:
    """Return the values with which each last node of an arm runs, as a label."""
    found: dict[str, list[str]] = {}
    for choice in (node["choice"] for node in nodes if node.get("choice")):
        for value, end in choice["arms"].items():
            found.setdefault(end, []).append(value)
        if choice["other"] is not None:
            found.setdefault(choice["other"], []).append("other")
    return {end: findings.listed(values, 6) for end, values in found.items()}


def _groups(nodes: Nodes) -> dict[str, Nodes]:
    found: dict[str, Nodes] = {}
    for node in nodes:
        found.setdefault(node["id"].partition("/")[0], []).append(node)
    return found


def _node_line(node: Mapping[str, Any], name: str) -> str:
    module, shown = str(node["module"]), output.line(name)
    if "map" in node:
        return f"{shown}  {_map_words(node['map'])}"
    if node.get("choice"):
        return f"{shown}  has the output of the arm that is chosen"
    if graph.is_engine(module):
        workflow = graph.workflow_of(module)
        if workflow is None:
            return f"{shown}  has the run's output"
        verb = "runs" if module.startswith(graph.RUN) else "starts"
        return f"{shown}  {verb} workflow {output.line(workflow)}"
    if loop := node.get("loop"):
        return f"{shown}  repeats these, at most {len(loop['rounds'])} times"
    asks = module.startswith(answers.MODULE)
    words = [shown, "asks a person" if asks else node["queue"]]
    if asks:
        words.append(f"({output.line(module.removeprefix(answers.MODULE))})")
    elif module != node["id"].rpartition("/")[2].partition("#")[0]:
        words.append(f"runs {output.line(module)}")
    if node["model"] is not None:
        words.append(f"model {output.line(node['model'])}")
    return "  ".join(words)


def _map_words(given: Mapping[str, Any]) -> str:
    share, count = given["may_fail"].get("share"), given["may_fail"].get("count")
    return output.listed(
        "for each item",
        given["key"] and f"key {output.line(given['key'])}",
        given["at_once"] and f"{given['at_once']} at once",
        f"{share:.0%} may fail" if share else count and f"{count} may fail",
    )


def _details(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    """Return what a node waits for, its inputs, its skip condition, its items and its policy."""
    if node["deps"]:
        yield f"after {output.line(findings.listed(node['deps'], 6), 1000)}"
    if node["step"] is None:
        for name, value in node["inputs"].items():
            yield output.line(f"{name} = {_value(value, ids)}", 120)
    elif node["step"].get("prompt"):
        yield output.line(f"prompt: {node['step']['prompt']}", 120)
    yield from _decision(node, ids)
    if node["skip_if"] is not None:
        yield output.line(f"skipped if {_value(node['skip_if'], ids)}", 120)
    if "map" in node:
        inner = ids | {node["map"]["item"], *(each["id"] for each in node["map"]["body"])}
        for each in _folded(node["map"]["body"]):
            yield f"each: {_node_line(each, each['id'])}"
            yield from (f"      {line}" for line in _details(each, inner))
    if policy := node.get("policy"):
        rules = ", ".join(f"{key} {output.compact(value)}" for key, value in policy.items())
        yield output.line(f"policy: {rules}", 120)


def _decision(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    if choice := node.get("choice"):
        arms = choice["arms"] | ({"other": choice["other"]} if choice["other"] else {})
        rules = ", ".join(f"{key} -> {end.partition('/')[2]}" for key, end in arms.items())
        yield output.line(f"by {_value(choice['on'], ids)}: {rules}", 120)
    if loop := node.get("loop"):
        yield output.line(f"until {_value(loop['rounds'][0]['until'], ids)}", 120)


def _value(value: Any, ids: frozenset[str]) -> str:
    """Return a short template: a ref by its path, `run.` before the run's own keys; else JSON."""
    if not isinstance(value, dict):
        return output.compact(value)
    record = cast("dict[str, Any]", value)
    if "$value" in record:
        return output.compact(record["$value"])
    if document_values.OUT in record:
        paths = record[document_values.OUT]
        if isinstance(paths, dict):
            return output.compact(cast("dict[str, Any]", paths)["$value"])
        listed = cast("list[str]", paths if isinstance(paths, list) else [paths])
        return ", ".join(f"out_dir/{path}" for path in listed)
    if "$from" in record:
        path = str(record["$from"])
        words = [path if path.partition(".")[0] in ids else f"run.{path}"]
        for key, sign in (("$filter", "where"), ("$eq", "=="), ("$ne", "!=")):
            words += [f"{sign} {output.compact(record[key])}"] if key in record else []
        return " ".join(words)
    return "{" + ", ".join(f"{key}: {_value(member, ids)}" for key, member in record.items()) + "}"


def _shape(node: Mapping[str, Any], name: str) -> str:
    if str(node["module"]).startswith(answers.MODULE):
        return f"[/{_quoted(name)}/]"
    if node.get("choice") or node.get("loop"):
        return "{" + _quoted(name) + "}"
    if (workflow := graph.workflow_of(str(node["module"]))) is not None:
        return f"[[{_quoted(name if name == workflow else f'{name}: {workflow}')}]]"
    if node["queue"] == "gpu":
        words = f"{name} ({node['model']})" if node["model"] else name
        return f"[[{_quoted(words)}]]"
    return f"[{_quoted(name)}]"


def _quoted(text: str) -> str:
    escaped = output.line(text).replace("#", "#35;").replace('"', "#quot;")
    return '"' + escaped.replace("<", "#lt;").replace(">", "#gt;") + '"'
