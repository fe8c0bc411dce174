"""Make random workflows, and say by a slow interpreter how the docs want each of them to end.

The interpreter knows nothing of the engine: it is written from docs/json-workflows.md, branch.md,
loops.md, maps.md, map-items.md and child-run-ends.md. It decides about one node after another,
until nothing changes.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

import queue_workflows

Json = dict[str, Any]
DONE = ("completed", "skipped")
AT_MOST = 3


class Unresolved(Exception):
    """A ref whose target is not there."""


class Case(NamedTuple):
    """A workflow with all that it needs, and the answers to its questions by node."""

    workflow: Json
    pipelines: dict[str, Json]
    children: dict[str, Json]
    context: Json
    answers: Json


class End(NamedTuple):
    """How a run ends. `outputs` and `inputs` are those of completed nodes that have a handler."""

    run: str
    nodes: dict[str, str]
    outputs: Json
    inputs: Json
    culprits: set[str]
    """The nodes for which a failing run can fail."""


# --- the app --------------------------------------------------------------------------------------


def act(inputs: Json, attempt: int) -> Any:
    """Do what the input `do` says, as every node of these workflows does."""
    do = inputs.get("do") or {}
    if attempt <= do.get("fails", 0) or inputs.get("bad"):
        raise ValueError("told to fail")
    if "adds" in do:
        return {"v": inputs["state"]["v"] + do["adds"]}
    if do.get("gives") is None:
        return None
    seen = {name: value for name, value in inputs.items() if name != "do"}
    return {**do["gives"], "seen": seen} if do["gives"] else {}


# --- random workflows -----------------------------------------------------------------------------

_CONTEXT = {
    "a": 1, "zero": 0, "flag": True, "none": None, "text": "x", "empty": [],
    "l": [{"kind": "x", "n": 1}, {"kind": "y", "n": "2"}, {"n": 3}, 4], "d": {"k": {"z": [1, 2]}},
}  # fmt: skip
_ITEMS = ("red", "green.1", "blue")


class _Author:
    """Write one workflow. Refs go to nodes that were written before, wherever they are declared."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.pipelines: dict[str, Json] = {}
        self.children: dict[str, Json] = {}
        self.steps: list[Json] = []
        self.answers: Json = {}
        self.known: list[str] = []
        """The nodes that have `v`, perhaps."""
        self.empty: set[str] = set()
        """The names of nodes that return nothing."""

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def case(self) -> Case:
        kinds = ["pipeline"] * 6 + ["input", "branch", "loop", "map", "run", "other"]
        for number in range(self.random.randint(1, 4)):
            write = getattr(self, f"_{self.random.choice(kinds)}")
            write(f"s{number}", self._after())
        self._skips()
        steps = copy.deepcopy(self.steps)
        if self.chance(0.3):
            self.random.shuffle(steps)
        context = {**_CONTEXT, **self._shadows()}
        workflow = {"name": "w", "steps": steps}
        return Case(workflow, self.pipelines, self.children, context, self.answers)

    def _shadows(self) -> Json:
        """Return values that the context has under the ids of nodes."""
        chosen = [each for each in self.known if self.chance(0.5 if each in self.empty else 0.1)]
        return {each: {"v": 7, "flag": self.chance(0.6)} for each in chosen}

    def _after(self) -> list[str]:
        """Return what a step depends on: steps, or a node of one."""
        found = [step["id"] for step in self.steps if self.chance(0.5)]
        nodes = [each for each in self.known if "/" in each and "#" not in each]
        return [*found, self.random.choice(nodes)] if nodes and self.chance(0.15) else found

    def _value(self) -> Any:
        return self.random.choice([0, 1, 2, True, False, None, "x", "y", [], [1], {"k": 1}])

    def _ref(self, nodes: list[str]) -> Json:
        if not nodes or self.chance(0.3):
            path = self.random.choice([*_CONTEXT, "d.k.z.1", "d.k", *(["no"] * self.chance(0.1))])
        else:
            tail = self.random.choice([".v", ".v", ".flag", "", *([".no"] * self.chance(0.2))])
            empty = [each for each in nodes if each in self.empty]
            path = self.random.choice(empty if empty and self.chance(0.3) else nodes) + tail
        ref: Json = {"$from": path}
        if self.chance(0.3):
            ref[self.random.choice(["$eq", "$ne"])] = self._value()
        elif path == "l" and self.chance(0.6):
            ref["$filter"] = self.random.choice(
                [{"kind:eq": "x"}, {"kind:eq": None}, {"n:matches": "^[12]"}, {}]
            )
        return ref if self.chance(0.85) else {"in": ref}

    def _do(self, **more: Any) -> Json:
        gives: Json | None = {"v": self._value(), "flag": self.chance(0.5)}
        if self.chance(0.15):
            gives = self.random.choice([None, {}])
        return {"gives": gives, **more}

    def _node(
        self, name: str, step_inputs: Json, nodes: list[str], deps: list[str], full: str = ""
    ) -> Json:
        """Return a node of a pipeline; its refs are inputs of the step."""
        do, policy = self._do(), dict[str, Any]()
        if not do["gives"]:
            self.empty.add(full)
        if self.chance(0.12):
            do["fails"] = 1
            if self.chance(0.75):
                policy = {"retries": 1, "backoff": {"kind": "constant", "base_s": 0}}
        inputs = [{"name": "do", "from": f"pipeline._implicit({json.dumps(do)})"}]
        for number in range(self.random.randint(0, 2)):
            key = f"{name}_{number}"
            if self.chance(0.9):
                step_inputs[key] = self._ref(nodes) if self.chance(0.7) else self._value()
            inputs.append({"name": f"i{number}", "from": f"pipeline.{key}"})
        return {"id": name, "node": "act", "inputs": inputs, "depends_on": deps, **policy}

    def _pipeline(self, step_id: str, after: list[str]) -> None:
        inputs: Json = {}
        nodes: list[Json] = []
        fresh: list[str] = []
        for number in range(self.random.randint(1, 4)):
            deps = [node["id"] for node in nodes if self.chance(0.5)]
            full = f"{step_id}/n{number}"
            nodes.append(self._node(f"n{number}", inputs, [*self.known, *fresh], deps, full))
            fresh.append(full)
        self.known += fresh
        self._add(step_id, "pipeline", after, nodes, inputs=inputs)

    def _add(
        self, step_id: str, kind: str, after: list[str], nodes: list[Json], **more: Any
    ) -> None:
        self.pipelines[f"p_{step_id}"] = {"name": f"p_{step_id}", "nodes": nodes}
        step = {"id": step_id, "kind": kind, "pipeline": f"p_{step_id}", "depends_on": after}
        self.steps.append({**step, **more})

    def _input(self, step_id: str, after: list[str]) -> None:
        self.steps.append(
            {"id": step_id, "kind": "input", "widget": "own", "target": "v", "depends_on": after}
        )
        self.answers[step_id] = self._value()
        self.known.append(step_id)

    def _branch(self, step_id: str, after: list[str]) -> None:
        inputs: Json = {}
        nodes = [self._node("first", inputs, self.known, [])] if self.chance(0.5) else []
        behind = [node["id"] for node in nodes]
        nodes.append(self._node("x", inputs, self.known, behind))
        nodes.append(self._node("y", inputs, self.known, []))
        more: Json = {"arms": {"x": "x", "true": "x", "1": "y", "0": "y"}}
        if self.chance(0.85):
            nodes.append(self._node("rest", inputs, self.known, []))
            more["other"] = "rest"
        on = {"$from": "text"}
        if self.known and self.chance(0.7):
            on = {"$from": f"{self.random.choice(self.known)}.v"}
        self._add(step_id, "branch", after, nodes, inputs=inputs, on=on, **more)
        self.known.append(step_id)

    def _loop(self, step_id: str, after: list[str]) -> None:
        adds = {"name": "do", "from": 'pipeline._implicit({"adds": 1})'}
        state = {"name": "state", "from": "pipeline.state"}
        nodes = [{"id": "add", "node": "act", "inputs": [adds, state]}]
        inputs: Json = {"state": {"$from": step_id}}
        if self.chance(0.5):
            before = self._node("before", inputs, self.known, [])
            nodes = [before, {**nodes[0], "depends_on": ["before"]}]
        until = {"$from": f"{step_id}.v", "$eq": self.random.randint(1, AT_MOST + 1)}
        more: Json = {"start": {"v": 0}, "until": until, "at_most": AT_MOST, "result": "add"}
        more["must"] = self.chance(0.3)
        self._add(step_id, "loop", after, nodes, inputs=inputs, **more)
        self.known.append(step_id)

    def _map(self, step_id: str, after: list[str]) -> None:
        items = [
            {"key": key, "v": self._value(), "bad": self.chance(0.15), "skip": self.chance(0.2)}
            for key in _ITEMS
            if self.chance(0.7)
        ]
        inputs: Json = {"item": {"$from": "item.v"}, "bad": {"$from": "item.bad"}}
        first = self._node("one", inputs, self.known, [])
        first["inputs"] += [{"name": name, "from": f"pipeline.{name}"} for name in ("item", "bad")]
        nodes = [first]
        if self.chance(0.5):
            nodes.append(self._node("two", inputs, ["one"], ["one"]))
        if self.chance(0.5):
            nodes[-1]["skip_if"] = {"$from": "item.skip"}
        more: Json = {"over": items, "key": "key", "may_fail": self.random.choice([0, 1, 1.0])}
        if self.chance(0.5):
            more["at_once"] = self.random.randint(1, 2)
        self._add(step_id, "map", after, nodes, inputs=inputs, **more)

    def _run(self, step_id: str, after: list[str]) -> None:
        author = _Author(self.random)
        author._pipeline("c", [])
        name = f"child_{step_id}"
        output = {"v": {"$from": f"{author.known[0]}.v"}} if self.chance(0.9) else {"v": 3}
        pipeline = {**author.steps[0], "pipeline": f"p_{name}"}
        self.pipelines[f"p_{name}"] = author.pipelines["p_c"]
        self.children[name] = {"name": name, "steps": [pipeline], "output": output}
        inputs = {**_CONTEXT, "a": self._ref(self.known)}
        step = {"id": step_id, "kind": "run", "workflow": name, "inputs": inputs}
        self.steps.append({**step, "depends_on": after})
        self.known.append(step_id)

    def _other(self, step_id: str, after: list[str]) -> None:
        if self.steps:
            self.steps.append({"id": step_id, "kind": "note", "depends_on": after})
        else:
            self._pipeline(step_id, after)

    def _skips(self) -> None:
        """Give conditions to steps and nodes; a ref in one is to a node that is done by then."""
        made = Graph({"name": "w", "steps": self.steps}, self.pipelines)
        for step in self.steps:
            owned = [unit for unit in made.units.values() if unit.step is step]
            if owned and self.chance(0.15):
                before = set.intersection(*(made.ancestors(unit.id) for unit in owned))
                step["skip_if"] = self._condition(before)
            for node in self._nodes(step):
                unit = made.units.get(f"{step['id']}/{node['id']}")
                if unit is not None and self.chance(0.25):
                    node["skip_if"] = self._condition(made.ancestors(unit.id))
                elif self.chance(0.05):
                    node["skip_if"] = self.random.choice([None, False, {}, [], 0])

    def _nodes(self, step: Json) -> list[Json]:
        kinds = ("pipeline", "branch")
        return self.pipelines[step["pipeline"]]["nodes"] if step["kind"] in kinds else []

    def _condition(self, before: set[str]) -> Any:
        if self.chance(0.1):
            return self.random.choice([True, 1, "yes", {"$value": 0}])
        return self._ref(sorted(before.intersection(self.known)))


def case(random: Random) -> Case:
    """Return a random workflow."""
    return _Author(random).case()


# --- the graph, as the docs describe it -----------------------------------------------------------


class Unit(NamedTuple):
    """A node of the graph: its step, its node in the pipeline, and what it waits for."""

    id: str
    step: Json
    node: Json | None
    deps: list[str]


class Graph:
    """The nodes of a workflow by id. The rounds of a loop and a map's items are not among them."""

    def __init__(self, workflow: Json, pipelines: Mapping[str, Json]) -> None:
        self.pipelines = pipelines
        self.steps: dict[str, Json] = {step["id"]: step for step in workflow["steps"]}
        self.units: dict[str, Unit] = {}
        for step in self.steps.values():
            for unit in self._of_step(step):
                self.units[unit.id] = unit
        for unit in self.units.values():
            for head in self._referred(unit):
                if head in self.units and head != unit.id and head not in unit.deps:
                    unit.deps.append(head)

    def _of_step(self, step: Json) -> Iterator[Unit]:
        before = self._before(step)
        if step["kind"] == "note":
            return
        if step["kind"] in ("pipeline", "branch"):
            nodes = self.nodes(step)
            for node in nodes:
                own = [f"{step['id']}/{dep}" for dep in node.get("depends_on", [])]
                yield Unit(f"{step['id']}/{node['id']}", step, node, own or [*before])
        if step["kind"] == "branch":
            yield Unit(step["id"], step, None, [f"{step['id']}/{end}" for end in _ends(step)])
        elif step["kind"] != "pipeline":
            yield Unit(step["id"], step, None, [*before])

    def nodes(self, step: Json) -> list[Json]:
        return self.pipelines[step["pipeline"]]["nodes"]

    def _before(self, step: Json) -> list[str]:
        found: list[str] = []
        for dep in step.get("depends_on", []):
            if dep not in self.steps:
                found.append(dep)
            elif self.steps[dep]["kind"] == "note":
                found += self._before(self.steps[dep])
            elif self.steps[dep]["kind"] == "pipeline":
                nodes = self.nodes(self.steps[dep])
                followed = {each for node in nodes for each in node.get("depends_on", [])}
                found += [f"{dep}/{node['id']}" for node in nodes if node["id"] not in followed]
            else:
                found.append(dep)
        return list(dict.fromkeys(found))

    def _referred(self, unit: Unit) -> set[str]:
        """Return the heads of the refs that have to be resolved before the node can run."""
        step, node = unit.step, unit.node
        if step["kind"] == "input":
            return set()
        if node is not None:
            given = [templates(step, node)]
            given += [step["on"]] if step["kind"] == "branch" else []
        elif step["kind"] == "branch":
            given = [step["on"]]
        else:
            given = [step.get(key) for key in ("inputs", "over", "start", "until")]
        own = {step["id"]} if step["kind"] == "loop" else set[str]()
        return heads(given) - own

    def ancestors(self, unit_id: str) -> set[str]:
        found: set[str] = set()
        waiting = [unit_id]
        while waiting:
            fresh = set(self.units[waiting.pop()].deps) - found
            found |= fresh
            waiting += fresh
        return found


def _ends(step: Json) -> list[str]:
    return list(dict.fromkeys([*step["arms"].values(), *filter(None, [step.get("other")])]))


def templates(step: Json, node: Json) -> Json:
    """Return the inputs of a pipeline's node as the step and the literals give them."""
    found: Json = {}
    for given in node["inputs"]:
        source = given["from"].removeprefix("pipeline.")
        if source.startswith("_implicit("):
            found[given["name"]] = {"$value": json.loads(source[len("_implicit(") : -1])}
        else:
            found[given["name"]] = step.get("inputs", {}).get(source)
    return found


def heads(template: Any) -> set[str]:
    if isinstance(template, list):
        return set().union(*map(heads, template))
    if not isinstance(template, dict) or "$value" in template:
        return set()
    if "$from" in template:
        return {template["$from"].split(".")[0]}
    return set().union(*map(heads, template.values()))


def resolve(template: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of a template. Raises `Unresolved`."""
    if not isinstance(template, dict):
        return template
    if "$value" in template:
        return template["$value"]
    if "$from" not in template:
        return {key: resolve(member, values) for key, member in template.items()}
    found: Any = values
    for part in template["$from"].split("."):
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            raise Unresolved(template["$from"])
    if "$filter" in template:
        return [each for each in found if isinstance(each, dict) and _matches(each, template)]
    if "$eq" in template:
        return found == template["$eq"]
    return found != template["$ne"] if "$ne" in template else found


def _matches(member: Json, template: Json) -> bool:
    for key, operand in template["$filter"].items():
        field, _, operator = key.partition(":")
        if operator == "eq":
            if member.get(field) != operand:
                return False
        elif not str(member.get(field, "-")).startswith(tuple("12")):  # the pattern is ^[12]
            return False
    return True


# --- the interpreter ------------------------------------------------------------------------------


class _Run:
    """Decide about the nodes of one run."""

    def __init__(self, case_: Case, workflow: Json, context: Json) -> None:
        self.case = case_
        self.workflow = workflow
        self.graph = Graph(workflow, case_.pipelines)
        self.context = context
        self.states: dict[str, str] = {}
        self.outputs: Json = {}
        self.inputs: Json = {}
        self.culprits: set[str] = set()
        """Nodes that fail, cannot get their inputs, or as a branch, loop or map cannot end."""

    def end(self) -> End:
        waiting = list(self.graph.units.values())
        while True:
            ready = [
                unit for unit in waiting if all(self.states.get(dep) in DONE for dep in unit.deps)
            ]
            if not ready:
                break
            for unit in ready:
                waiting.remove(unit)
                try:
                    self._decide(unit)
                except Unresolved:
                    branch = {unit.step["id"]} if unit.step["kind"] == "branch" else set[str]()
                    self.culprits |= {unit.id, *branch}
        status = "failed" if self.culprits or waiting else "completed"
        if "output" in self.workflow and status == "completed":
            try:
                self.outputs["__output__"] = resolve(self.workflow["output"], self.values())
                self.states["__output__"] = "completed"
            except Unresolved:
                status = "failed"
        return End(status, self.states, self.outputs, self.inputs, self.culprits)

    def values(self) -> Json:
        """Return what refs see: the context, and over it the outputs that are not empty."""
        full = {key: value for key, value in self.outputs.items() if value}
        return {**self.outputs, **self.context, **full}

    def _decide(self, unit: Unit) -> None:
        kind = unit.step["kind"]
        if self._skipped(unit):
            self.states[unit.id] = "skipped"
            if kind == "loop":
                self._rounds(unit, 0)
        elif unit.node is not None:
            self._handler(unit.id, templates(unit.step, unit.node), unit.node, self.values())
        else:
            getattr(self, f"_end_{kind}")(unit)

    def _skipped(self, unit: Unit) -> bool:
        own = unit.node.get("skip_if") if unit.node is not None else None
        if self.holds(own or unit.step.get("skip_if"), self.values()):
            return True
        if unit.step["kind"] == "branch" and unit.node is not None:
            return unit.node["id"] not in self._arm(unit.step)
        return False

    def holds(self, condition: Any, values: Json) -> bool:
        try:
            return bool(resolve(condition, values))
        except Unresolved:
            return False

    def _chosen(self, step: Json) -> str:
        """Return the last node of the arm that the branch chooses."""
        value = resolve(step["on"], self.values())
        known = {None: "null", True: "true", False: "false"}
        key: Any = value if isinstance(value, str) else None
        if value is None or isinstance(value, bool):
            key = known[value]
        elif isinstance(value, int):
            key = str(value)
        chosen = step["arms"].get(key, step.get("other"))
        if chosen is None:
            raise Unresolved(f"no arm for {value!r}")
        return chosen

    def _arm(self, step: Json) -> set[str]:
        """Return the nodes of the chosen arm: its last one, and those that it depends on."""
        nodes = {node["id"]: node for node in self.graph.nodes(step)}
        found, waiting = set[str](), [self._chosen(step)]
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting += nodes[name].get("depends_on", [])
        return found

    def _handler(self, unit_id: str, given: Json, node: Json, values: Json) -> None:
        inputs = {name: resolve(template, values) for name, template in given.items()}
        attempts = 1 + node.get("retries", 0)
        for attempt in range(1, attempts + 1):
            try:
                found = act(inputs, attempt)
            except ValueError:
                continue
            self._complete(unit_id, found if isinstance(found, dict) else {})
            self.inputs[unit_id] = inputs
            return
        self.states[unit_id] = "failed"
        if "[" not in unit_id:
            self.culprits.add(unit_id)

    def _complete(self, unit_id: str, output: Json) -> None:
        self.states[unit_id] = "completed"
        self.outputs[unit_id] = output

    def _end_input(self, unit: Unit) -> None:
        value = self.case.answers[unit.id]
        self._complete(unit.id, {} if value is None else {"v": value})

    def _end_branch(self, unit: Unit) -> None:
        end = f"{unit.id}/{self._chosen(unit.step)}"
        self._complete(unit.id, self.outputs.get(end) or self.context.get(end) or {})

    def _end_loop(self, unit: Unit) -> None:
        step, state, number = unit.step, unit.step["start"], 0
        for number in range(1, step["at_most"] + 1):
            fresh = self._round(unit, state, number)
            if fresh is None:
                return
            state = fresh
            if resolve(step["until"], {step["id"]: state}):
                break
        else:
            if step["must"]:
                raise Unresolved("until")
        self._rounds(unit, number)
        self._complete(unit.id, state)

    def _round(self, unit: Unit, state: Json, number: int) -> Json | None:
        values = {**self.values(), unit.id: state}
        for node in self.graph.nodes(unit.step):
            node_id = f"{unit.id}/{node['id']}#{number}"
            self._handler(node_id, templates(unit.step, node), node, values)
            if self.states[node_id] == "failed":
                return None
        return self.outputs[f"{unit.id}/{unit.step['result']}#{number}"]

    def _rounds(self, unit: Unit, number: int) -> None:
        """Skip the rounds after this one."""
        for later in range(number + 1, unit.step["at_most"] + 1):
            for node in self.graph.nodes(unit.step):
                self.states[f"{unit.id}/{node['id']}#{later}"] = "skipped"

    def _end_map(self, unit: Unit) -> None:
        results, failed = dict[str, Any](), list[str]()
        for item in resolve(unit.step["over"], self.values()):
            self._item(unit, item, results, failed)
        may_fail = unit.step["may_fail"]
        total = len(unit.step["over"])
        if len(failed) > (int(may_fail * total) if isinstance(may_fail, float) else may_fail):
            self.culprits.add(unit.id)
            return
        self._complete(
            unit.id, {"results": [*results.values()], "keys": [*results], "failed": sorted(failed)}
        )

    def _item(self, unit: Unit, item: Json, results: Json, failed: list[str]) -> None:
        own: Json = {}
        node_id = ""
        for node in self.graph.nodes(unit.step):
            node_id = f"{unit.id}[{item['key']}]/{node['id']}"
            values = {**self.values(), **own, "item": item}
            if self.holds(node.get("skip_if"), values):
                self.states[node_id] = "skipped"
                continue
            try:
                self._handler(node_id, templates(unit.step, node), node, values)
            except Unresolved:
                failed.append(item["key"])
                return
            if self.states[node_id] == "failed":
                failed.append(item["key"])
                return
            own[node["id"]] = self.outputs[node_id]
        if self.states[node_id] == "completed":
            results[item["key"]] = self.outputs[node_id]

    def _end_run(self, unit: Unit) -> None:
        inputs = {key: resolve(each, self.values()) for key, each in unit.step["inputs"].items()}
        child = _Run(self.case, self.case.children[unit.step["workflow"]], inputs).end()
        if child.run == "failed":
            self.states[unit.id] = "failed"
            self.culprits.add(unit.id)
            return
        self._complete(unit.id, child.outputs["__output__"])


def expected(case_: Case) -> End:
    """Return how the run of a case ends, as the docs say.

    Of a run that fails, the states of the nodes are those that they have if nothing is cancelled.
    """
    return _Run(case_, case_.workflow, case_.context).end()


# --- the app of these workflows -------------------------------------------------------------------


def provide(cases: Mapping[str, Case]) -> None:
    """Make these cases the workflows of this process: `<name>`, with own pipelines and children."""
    workflows: dict[str, Json] = {}
    pipelines: dict[str, Json] = {}
    for name, each in cases.items():
        for key, workflow in {name: each.workflow, **each.children}.items():
            full = key if key == name else f"{name}.{key}"
            steps = [_named(step, name) for step in workflow["steps"]]
            workflows[full] = {**workflow, "name": full, "steps": steps}
        pipelines |= {f"{name}.{key}": flow for key, flow in each.pipelines.items()}
    queue_workflows.register_node("act", handler)
    queue_workflows.set_workflow_provider(workflows.__getitem__, pipelines.__getitem__)


def provider() -> tuple[Any, Any]:
    """Return the loaders that `provide` has set."""
    found = queue_workflows.get_config()
    return found.workflow_loader, found.pipeline_schema_loader


def _named(step: Json, name: str) -> Json:
    named = {key: f"{name}.{step[key]}" for key in ("pipeline", "workflow") if key in step}
    return {**step, **named}


def handler(inputs: Json) -> Any:
    """Do what the input `do` says; see `act`."""
    return act(inputs, queue_workflows.current_job().attempt)


SEEDS = "QW_REFERENCE_SEEDS"


def setup() -> None:
    """Be the app of real processes: the cases of the seeds that `QW_REFERENCE_SEEDS` lists."""
    seeds = json.loads(os.environ[SEEDS])
    provide({f"w{seed}": case(Random(seed)) for seed in seeds})


# --- what has become of a run ---------------------------------------------------------------------


def difference(case_: Case, run: Json, jobs: list[Json]) -> list[str]:
    """Return how a run that has ended is not as the interpreter says; [] if all is equal."""
    want = expected(case_)
    if run["status"] != want.run:
        return [f"run {want.run} -> {run['status']} ({run['error']})"]
    found = {job["node_id"]: job for job in jobs}
    told: list[str] = []
    if want.run == "failed" and not any(each in run["error"] for each in want.culprits):
        told.append(f"it failed by {run['error']!r}, not by one of {sorted(want.culprits)}")
    for node_id in sorted(want.nodes.keys() | found.keys()):
        state = want.nodes.get(node_id, "-")
        now = found[node_id]["status"] if node_id in found else "-"
        if want.run == "completed" and state != now:
            told.append(f"{node_id}: {state} -> {now}")
        elif now in DONE and state != now:
            told.append(f"{node_id}: {state} -> {now} in a run that fails")
        elif now == "completed":
            told += _values(node_id, want, found[node_id])
    return told


def _values(node_id: str, want: End, job: Json) -> Iterator[str]:
    output = job["context_delta"]
    if "results" in output and "keys" in output:  # of a map; the texts of errors are not told
        output = {**output, "failed": sorted(each["key"] for each in output["failed"])}
    if not _same(output, want.outputs[node_id]):
        yield f"{node_id}: output {want.outputs[node_id]!r:.400} -> {output!r:.400}"
    if node_id in want.inputs:
        got = job["inputs"] if job["resolved_inputs"] is None else job["resolved_inputs"]
        if not _same(got, want.inputs[node_id]):
            yield f"{node_id}: inputs {want.inputs[node_id]!r:.400} -> {got!r:.400}"


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
