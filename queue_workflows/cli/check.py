"""Define `queue-workflows check WORKFLOW`: find what would fail before the workflow runs.

It prints the graph as a tree for people, or as Mermaid for pages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from queue_workflows import check as checks
from queue_workflows import config, errors
from queue_workflows.check import findings
from queue_workflows.cli import command, define, output
from queue_workflows.dag import answers, definition, document_values, graph
from queue_workflows.runtime import app_loading, stored_json

Nodes = list[graph.Node]
_BRANCHES = {True: ("├─ ", "│  ", "└─ ", "   "), False: ("|- ", "|  ", "`- ", "   ")}


@define.command(
    "check",
    """WORKFLOW  Its name, or a JSON file with a workflow or an expanded definition; without it all
        that the app declares in Python.
    --format FORMAT tree|json|mermaid  How it is printed.
    --strict  Warnings count as errors.""",
    takes="app debug",
    reads=False,
)
def check(
    workflow: str | None = None, form: str = "tree", strict: bool = False, *, app: str | None
) -> int:
    """Check a workflow against its code.

    Exit code 0: it can run, 1: it cannot, 2: wrong usage.
    """
    chosen = app_loading.load_app(app)
    names = sorted(config.get_config().workflow_map) if workflow is None else [workflow]
    if not names:
        raise errors.InvalidConfig(
            f"--app {chosen} declares no workflow in Python: name the one to check"
            if chosen
            else "name a workflow or a file, or an app that declares some by --app"
        )
    reports = [_checked(each, chosen) for each in names]
    _SHOW[form](reports)
    found = [finding for report in reports for finding in report.findings]
    bad = [finding for finding in found if strict or finding.level == "error"]
    return 1 if bad else 0


def _checked(workflow: str, app: str | None) -> checks.Report:
    """Return the report on a workflow's name or file.

    A text that ends in .json or contains a slash is a file if it exists, else a name, since names
    may contain slashes. A workflow declared in Python is preferred to a file.
    """
    wired = config.get_config()
    looks_like_file = workflow.endswith(".json") or os.sep in workflow
    if looks_like_file and workflow not in wired.workflow_map:
        path = Path(workflow)
        # Without a provider the name is unknown anyway, so report the fault of the file.
        # `Path.is_file` raises for a name that is too long.
        if os.path.isfile(path) or wired.workflow_loader is None:  # noqa: PTH113
            return _of_file(path)
    try:
        return checks.workflow(workflow)
    except errors.UnknownWorkflow as error:
        meant = errors.hint(workflow, wired.workflow_map)
        hint = f"; is --app {app} the one that has it?" if app else "; name its app by --app"
        no_file = f", and {workflow}: No such file" if looks_like_file else ""
        text = str(error).removesuffix(meant) + no_file + (meant or hint)
        raise errors.UnknownWorkflow(text) from error


def _of_file(path: Path) -> checks.Report:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise errors.InvalidConfig(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise errors.InvalidConfig(f"{path} does not hold a JSON object")
    record = cast("dict[str, Any]", found)
    if isinstance(record.get("definition"), dict):
        record = cast("dict[str, Any]", record["definition"])
    if "steps" in record:
        own = stored_json.mapping(record.get("pipelines"))
        return checks.document(record, pipelines=own)
    if "nodes" in record and "workflow" in record:
        return checks.definition(record)
    raise errors.InvalidConfig(
        f"{path} is neither a workflow ('name' and 'steps', its 'pipelines' beside them or in the "
        "app) nor an expanded definition ('workflow' and 'nodes')"
    )


def _as_tree(reports: Iterable[checks.Report]) -> None:
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for report in reports:
        if report.definition is not None:
            for line in tree(report.definition, report.needs, unicode=unicode):
                output.echo(line)
        for finding in report.findings:
            output.echo(output.line(finding, 1000))
        errs = sum(finding.level == "error" for finding in report.findings)
        warns = len(report.findings) - errs
        words = output.listed(
            errs and output.counted(errs, "error"), warns and output.counted(warns, "warning")
        )
        output.echo(f"{output.line(report.name)}: {words or 'no problems found'}")


def _as_json(reports: list[checks.Report]) -> None:
    shown = [
        {
            "workflow": one.name, "ok": one.ok, "needs": list(one.needs),
            "findings": [finding._asdict() for finding in one.findings],
            "digest": definition.digest(one.definition) if one.definition else None,
            "definition": one.definition,
        }
        for one in reports
    ]  # fmt: skip
    output.dump(shown[0] if len(shown) == 1 else shown)


def _as_mermaid(reports: Iterable[checks.Report]) -> None:
    """Print several graphs one after the other; findings go to stderr."""
    for report in reports:
        if report.definition is not None:
            for line in mermaid(report.definition):
                output.echo(line)
        for finding in report.findings:
            command.print_message(output.line(finding, 1000))


_SHOW = {"tree": _as_tree, "json": _as_json, "mermaid": _as_mermaid}


# --- graphs as text ----------------------------------------------------------------------------


def tree(definition: Mapping[str, Any], needs: Iterable[str], *, unicode: bool) -> Iterator[str]:
    """Return the lines of a tree: steps in order, below each its nodes with their inputs."""
    nodes = graph.read(definition).nodes
    count, takes = output.counted(len(nodes), "node"), ", ".join(needs)
    yield output.line(f"{definition['workflow']}: {count}") + (
        f", from the run: {output.line(takes)}" if takes else ""
    )
    ids = frozenset(nodes)
    groups = _groups(_folded(nodes.values()))
    for step, mark, rail in _branches(groups, unicode):
        inside = groups[step]
        if len(inside) == 1:
            yield f"{mark}{_node_line(inside[0], inside[0].id)}"
            yield from (f"{rail}   {line}" for line in _details(inside[0], ids))
            continue
        yield f"{mark}{output.line(step)}"
        for node, inner, inner_rail in _branches(inside, unicode):
            yield f"{rail}{inner}{_node_line(node, _short(node))}"
            yield from (f"{rail}{inner_rail}   {line}" for line in _details(node, ids))


def _branches(members: Collection[Any], unicode: bool) -> Iterator[tuple[Any, str, str]]:
    """Yield each member with the prefix of its line and the prefix of the lines below it."""
    branch, down, last, under = _BRANCHES[unicode]
    for number, member in enumerate(members, start=1):
        yield (member, last, under) if number == len(members) else (member, branch, down)


def mermaid(definition: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of a Mermaid flowchart: a subgraph per step, an edge per dependency."""
    yield "flowchart TD"
    shown = _folded(graph.read(definition).nodes.values())
    keys = {node.id: f"n{index}" for index, node in enumerate(shown)}
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
            name, key = _short(node) if boxed else node.id, keys[node.id]
            if node.map is not None:
                # A map is a subgraph with the nodes of one item.
                yield f"subgraph {key} [{_quoted(node.id + ', each item')}]"
                body = _folded(node.map.body.nodes.values())
                inner = {each.id: f"{key}_{index}" for index, each in enumerate(body)}
                deciding = {each.arm for each in body if each.arm}
                yield from (f"    {line}" for line in _flowchart(body, deciding, inner, f"{key}_s"))
                yield "end"
            else:
                yield f"{'    ' if boxed else ''}{key}{_shape(node, name)}"
        if boxed:
            yield "end"
    yield from _edges(shown, keys)


def _edges(shown: Nodes, keys: Mapping[str, str]) -> Iterator[str]:
    """Return an edge per dependency, and one for each loop; without nodes that are not drawn."""
    choosing = _choosing(shown)
    for node in shown:
        values = choosing.get(node.id)
        for dep in filter(keys.__contains__, node.deps):
            arrow = "-->" if node.skip_if is None and not values else "-.->"
            label = " "
            if values and not dep.startswith(f"{node.arm}/"):
                label = f"|{_quoted(values)}| "
            yield f"{keys[dep]} {arrow}{label}{keys[node.id]}"
        if node.loop is not None:
            first = next((each.id for each in shown if each.arm == node.id), "")
            end = node.loop.rounds[0].end
            if first in keys and end in keys:
                again = _quoted(f"again, at most {len(node.loop.rounds)}")
                yield f"{keys[end]} -.->|{again}| {keys[first]}"


def _folded(nodes: Iterable[graph.Node]) -> Nodes:
    """Return the nodes with the first round of each loop in the place of all rounds."""
    nodes = [*nodes]
    loops = {node.id: node.loop for node in nodes if node.loop}
    firsts = {
        f"{node.id.rpartition('#')[0]}#{len(loops[node.arm].rounds)}": node.id
        for node in nodes
        if node.round == 1 and node.arm in loops
    }
    return [
        node._replace(deps=tuple(firsts.get(dep, dep) for dep in node.deps)) if node.loop else node
        for node in nodes
        if (node.round or 1) == 1
    ]


def _short(node: graph.Node) -> str:
    """Return a node's id without the step; the whole id if it is the step's own."""
    return node.id.partition("/")[2] or node.id


def _choosing(nodes: Nodes) -> dict[str, str]:
    """Return the values with which each last node of an arm runs, as a label."""
    found: dict[str, list[str]] = {}
    for choice in (node.choice for node in nodes if node.choice):
        for value, end in choice.arms.items():
            found.setdefault(end, []).append(value)
        if choice.other is not None:
            found.setdefault(choice.other, []).append("other")
    return {end: findings.listed(values, 6) for end, values in found.items()}


def _groups(nodes: Nodes) -> dict[str, Nodes]:
    found: dict[str, Nodes] = {}
    for node in nodes:
        found.setdefault(node.id.partition("/")[0], []).append(node)
    return found


def _node_line(node: graph.Node, name: str) -> str:
    module, shown = node.module, output.line(name)
    if node.map is not None:
        return f"{shown}  {_map_words(node.map)}"
    if node.choice:
        return f"{shown}  has the output of the arm that is chosen"
    if graph.is_engine(module):
        workflow = graph.workflow_of(module)
        if workflow is None:
            return f"{shown}  has the run's output"
        verb = "runs" if module.startswith(graph.RUN) else "starts"
        return f"{shown}  {verb} workflow {output.line(workflow)}"
    if node.loop:
        return f"{shown}  repeats these, at most {len(node.loop.rounds)} times"
    asks = module.startswith(answers.MODULE)
    words = [shown, "asks a person" if asks else node.queue]
    if asks:
        words.append(f"({output.line(module.removeprefix(answers.MODULE))})")
    elif module != node.id.rpartition("/")[2].partition("#")[0]:
        words.append(f"runs {output.line(module)}")
    if node.model is not None:
        words.append(f"model {output.line(node.model)}")
    return "  ".join(words)


def _map_words(of: graph.Map) -> str:
    failing = f"{of.may_fail:.0%}" if isinstance(of.may_fail, float) else of.may_fail
    return output.listed(
        "for each item",
        of.key and f"key {output.line(of.key)}",
        of.at_once and f"{of.at_once} at once",
        of.may_fail and f"{failing} may fail",
    )


def _details(node: graph.Node, ids: frozenset[str]) -> Iterator[str]:
    """Return a node's dependencies, inputs, skip condition, items and policy, as lines."""
    if node.deps:
        yield f"after {output.line(findings.listed(node.deps, 6), 1000)}"
    if node.step is None:
        for name, value in node.inputs.items():
            yield output.line(f"{name} = {_value(value, ids)}", 120)
    elif node.step.get("prompt"):
        yield output.line(f"prompt: {node.step['prompt']}", 120)
    yield from _decision(node, ids)
    if node.skip_if is not None:
        yield output.line(f"skipped if {_value(node.skip_if, ids)}", 120)
    if node.map is not None:
        body = node.map.body.nodes
        inner = ids | {node.map.item, *body}
        for each in _folded(body.values()):
            yield f"each: {_node_line(each, each.id)}"
            yield from (f"      {line}" for line in _details(each, inner))
    if node.policy:
        rules = ", ".join(f"{key} {output.compact(value)}" for key, value in node.policy.items())
        yield output.line(f"policy: {rules}", 120)


def _decision(node: graph.Node, ids: frozenset[str]) -> Iterator[str]:
    if choice := node.choice:
        arms = choice.arms | ({"other": choice.other} if choice.other else {})
        rules = ", ".join(f"{key} -> {end.partition('/')[2]}" for key, end in arms.items())
        yield output.line(f"by {_value(choice.on, ids)}: {rules}", 120)
    if node.loop:
        yield output.line(f"until {_value(node.loop.rounds[0].until, ids)}", 120)


def _value(value: Any, ids: frozenset[str]) -> str:
    """Return a short template: a ref by its path, with `run.` before keys of the run; else JSON."""
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


def _shape(node: graph.Node, name: str) -> str:
    if node.module.startswith(answers.MODULE):
        return f"[/{_quoted(name)}/]"
    if node.choice or node.loop:
        return "{" + _quoted(name) + "}"
    if (workflow := graph.workflow_of(node.module)) is not None:
        return f"[[{_quoted(name if name == workflow else f'{name}: {workflow}')}]]"
    if node.queue == "gpu":
        words = f"{name} ({node.model})" if node.model else name
        return f"[[{_quoted(words)}]]"
    return f"[{_quoted(name)}]"


def _quoted(text: str) -> str:
    escaped = output.line(text).replace("#", "#35;").replace('"', "#quot;")
    return '"' + escaped.replace("<", "#lt;").replace(">", "#gt;") + '"'
