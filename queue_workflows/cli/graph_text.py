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
    groups = _groups(_folded(definition["nodes"]))
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
            yield f"{rail}{inner}{_node_line(node, _short(node))}"
            yield from (f"{rail}{inner_rail}   {line}" for line in _details(node, ids))


def mermaid(definition: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of a Mermaid flowchart: a subgraph per step, an edge per dependency."""
    yield "flowchart TD"
    shown = _folded(definition["nodes"])
    keys = {node["id"]: f"n{index}" for index, node in enumerate(shown)}
    groups = _groups(shown)
    boxes = {step for step, nodes in groups.items() if len(nodes) > 1}
    yield from _flowchart(groups, boxes, keys, "s", "    ")
    yield from _edges(shown, keys)


def _flowchart(
    groups: Mapping[str, Nodes],
    boxes: Collection[str],
    keys: Mapping[str, str],
    start: str,
    indent: str,
) -> Iterator[str]:
    """Return the nodes, those of the steps `boxes` in a subgraph each, named from `start` on."""
    for number, (step, nodes) in enumerate(groups.items()):
        boxed = step in boxes
        if boxed:
            yield f"{indent}subgraph {start}{number} [{_quoted(step)}]"
        for node in nodes:
            name = _short(node) if boxed else node["id"]
            if "map" in node:
                yield from _map_flowchart(node, keys[node["id"]], indent)
                continue
            yield f"{indent}{'    ' if boxed else ''}{keys[node['id']]}{_shape(node, name)}"
        if boxed:
            yield f"{indent}end"


def _edges(nodes: Nodes, keys: Mapping[str, str]) -> Iterator[str]:
    choosing = _choosing(nodes)
    for node in nodes:
        values = choosing.get(node["id"])
        for dep in node["deps"]:
            arrow = "-->" if node["skip_if"] is None and not values else "-.->"
            label = (
                f"|{_quoted(values)}| " if values and not dep.startswith(f"{node['arm']}/") else ""
            )
            yield f"    {keys[dep]} {arrow}{label or ' '}{keys[node['id']]}"
        if loop := node.get("loop"):
            first = next(each["id"] for each in nodes if each.get("arm") == node["id"])
            end = keys[loop["rounds"][0]["end"]]
            again = _quoted(f"again, at most {len(loop['rounds'])}")
            yield f"    {end} -.->|{again}| {keys[first]}"


def _folded(nodes: Nodes) -> Nodes:
    """Return the nodes with the first round of each loop in the place of all rounds."""
    firsts = {
        f"{node['id'].rpartition('#')[0]}#{len(loops[node['arm']]['rounds'])}": node["id"]
        for loops in [{node["id"]: node["loop"] for node in nodes if node.get("loop")}]
        for node in nodes
        if node.get("round") == 1
    }
    return [
        {**node, "deps": [firsts.get(dep, dep) for dep in node["deps"]]}
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


def _map_flowchart(node: Mapping[str, Any], key: str, indent: str) -> Iterator[str]:
    """Return a map as a subgraph with the nodes of one item."""
    yield f"{indent}subgraph {key} [{_quoted(node['id'] + ', each item')}]"
    body = _folded(node["map"]["body"])
    keys = {inner["id"]: f"{key}_{index}" for index, inner in enumerate(body)}
    groups = _groups(body)
    deciding = {each["arm"] for each in body if each.get("arm")}
    yield from _flowchart(groups, deciding, keys, f"{key}_s", f"{indent}    ")
    yield from (f"{indent}{line}" for line in _edges(body, keys))
    yield f"{indent}end"


def _groups(nodes: Nodes) -> dict[str, Nodes]:
    found: dict[str, Nodes] = {}
    for node in nodes:
        found.setdefault(node["id"].partition("/")[0], []).append(node)
    return found


def _node_line(node: Mapping[str, Any], name: str) -> str:
    if "map" in node:
        return f"{output.line(name)}  {_map_words(node['map'])}"
    asks = str(node["module"]).startswith(answers.MODULE)
    if node.get("choice"):
        return f"{output.line(name)}  has the output of the arm that is chosen"
    if graph.is_engine(str(node["module"])):
        return f"{output.line(name)}  {_engine_words(str(node['module']))}"
    if loop := node.get("loop"):
        return f"{output.line(name)}  repeats these, at most {len(loop['rounds'])} times"
    words = [output.line(name), "asks a person" if asks else node["queue"]]
    if asks:
        words.append(f"({output.line(str(node['module']).removeprefix(answers.MODULE))})")
    elif node["module"] != node["id"].rpartition("/")[2].partition("#")[0]:
        words.append(f"runs {output.line(node['module'])}")
    if node["model"] is not None:
        words.append(f"model {output.line(node['model'])}")
    return "  ".join(words)


def _engine_words(module: str) -> str:
    workflow = graph.workflow_of(module)
    if workflow is None:
        return "has the run's output"
    waits = module.startswith(graph.RUN)
    return f"{'runs' if waits else 'starts'} workflow {output.line(workflow)}"


def _map_words(given: Mapping[str, Any]) -> str:
    words = ["for each item"]
    words += [f"key {output.line(given['key'])}"] if given["key"] else []
    words += [f"{given['at_once']} at once"] if given["at_once"] else []
    allowed = given["may_fail"]
    if share := allowed.get("share"):
        words.append(f"{share:.0%} may fail")
    elif allowed.get("count"):
        words.append(f"{allowed['count']} may fail")
    return ", ".join(words)


def _details(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    """Return what a node waits for, its inputs, its skip condition and its policy."""
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
    yield from _of_items(node, ids)
    if policy := node.get("policy"):
        rules = ", ".join(f"{key} {output.compact(value)}" for key, value in policy.items())
        yield output.line(f"policy: {rules}", 120)


def _of_items(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    if "map" in node:
        inner = ids | {node["map"]["item"], *(each["id"] for each in node["map"]["body"])}
        for each in _folded(node["map"]["body"]):
            yield f"each: {_node_line(each, each['id'])}"
            yield from (f"      {line}" for line in _details(each, inner))


def _decision(node: Mapping[str, Any], ids: frozenset[str]) -> Iterator[str]:
    if choice := node.get("choice"):
        arms = {key: end.partition("/")[2] for key, end in choice["arms"].items()}
        arms |= {"other": choice["other"].partition("/")[2]} if choice["other"] else {}
        rules = ", ".join(f"{key} -> {end}" for key, end in arms.items())
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
        words += [f"where {output.compact(record['$filter'])}"] if "$filter" in record else []
        words += [f"== {output.compact(record['$eq'])}"] if "$eq" in record else []
        words += [f"!= {output.compact(record['$ne'])}"] if "$ne" in record else []
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
    flat = output.line(text)
    escaped = flat.replace("#", "#35;").replace('"', "#quot;")
    return '"' + escaped.replace("<", "#lt;").replace(">", "#gt;") + '"'
