"""Build the graph of a workflow from calls of nodes, pipelines and other workflows."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from queue_workflows import errors, refs
from queue_workflows.dag import graph
from queue_workflows.declare import handles, node_functions


class Options(NamedTuple):
    """The arguments of a call besides its inputs; `extra`: further keys of its entry."""

    id: str | None = None
    after: tuple[object, ...] = ()
    skip_if: object = None
    extra: Mapping[str, Any] = {}


class Step:
    """A step while it is built: `entry` becomes the document, `nodes` are its pipeline's."""

    def __init__(self, step_id: str, kind: str, around: Step | None = None) -> None:
        self.entry: dict[str, Any] = {"id": step_id, "kind": kind}
        self.around = around
        """The map in whose body the step is."""
        self.members: dict[str, Step | None] = {}
        """The branches, loops and child runs in a map's body by id, None for each node, in call
        order."""
        self.inputs: dict[str, Any] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.deps: dict[str, None] = {}
        self.prefix = "" if kind == "map" else f"{step_id}/"
        """The start of its nodes' ids in refs. Ids in a map's body are relative to the item."""
        self.outer: set[str] = set()
        """Heads of refs from a map's body to values outside of it."""

    def wait_for(self, found: Iterable[handles.Handle]) -> None:
        """Make this step depend on the steps of these handles."""
        own = self.entry["id"]
        for handle in found:
            origin = handles.origin(handle)
            if origin.body is not None:
                if self.around is not None and (dep := self.around.member_of(handle)) != own:
                    self.deps |= {} if dep is None else {dep: None}
                continue
            if self.around is not None:
                self.around.wait_for([handle])
                continue
            self.outer.add(handles.head(handle))
            if origin.step is not None and origin.step != own:
                self.deps[origin.step] = None

    def member_of(self, handle: handles.Handle) -> str | None:
        """Return the member of this map's body that has a value; None for the item."""
        origin = handles.origin(handle)
        return origin.node if origin.step == self.entry["id"] else origin.step

    def output(self, graph: object, **known: Any) -> handles.Origin:
        """Return the origin of this step's output, which a node of the step's id has."""
        own, around = self.entry["id"], self.around
        step = own if around is None else around.entry["id"]
        return handles.Origin(graph, step=step, node=own, body=around, **known)

    def node_ids(self) -> list[str]:
        """Return the ids of its nodes, and of the nodes of its members, as refs name them."""
        own = [f"{self.prefix}{node_id}" for node_id in self.nodes]
        inner = [step for step in self.members.values() if step is not None]
        return [*own, *(each for step in inner for each in (step.entry["id"], *step.node_ids()))]


class Graph:
    """The steps of one workflow in the order of their calls."""

    def __init__(self, name: str, callers: tuple[str, ...]) -> None:
        self.name = name
        self.callers = callers
        """The workflows whose functions call each other down to this one, the outermost first."""
        self.steps: dict[str, Step] = {}
        self.group: Step | None = None
        self.defaults: Mapping[str, Any] = {}
        self.run_inputs: dict[str, Any] = {}

    def add_node(
        self,
        function: node_functions.NodeFunction,
        entry: Mapping[str, Any],
        given: dict[str, Any],
        options: Options,
    ) -> handles.Handle:
        """Add a call of a node: in a pipeline a node of it, else a step of its own."""
        name, prefix, more = function.function.__name__, "", dict[str, Any]()
        if self.group is None:
            step, where = self.begin("pipeline", name, given, options)
            node_id = name
        else:
            step = self.group
            taken = step.members if step.entry["kind"] == "map" else step.nodes
            node_id = _free(options.id, name, taken, self.where, "nodes")
            step.members[node_id] = None
            prefix = f"{node_id}."
            where = f"{self.where}: step {step.entry['id']!r}: node {node_id!r}"
            more = self._wired(step, given, options, where)
        node: dict[str, Any] = {"id": node_id}
        if function.name != node_id:
            node["node"] = function.name
        node |= {**self.defaults, **entry, **options.extra, **more}
        listed: list[dict[str, str]] = []
        for key, value in given.items():
            step.inputs[prefix + key] = handles.template(value, f"{where}: input {key!r}")
            listed.append({"name": key, "from": f"pipeline.{prefix}{key}"})
        if listed:
            node["inputs"] = listed
        step.nodes[node_id] = node
        return self._made(step, f"{step.prefix}{node_id}", function.result)

    def _wired(self, step: Step, given: object, options: Options, where: str) -> dict[str, Any]:
        """Return when a node of a step is skipped, and for which of the step's nodes it waits."""
        found = self.found((given, options.skip_if), where) + self._waited(options.after, where)
        step.wait_for(found)
        inner: dict[str, None] = {}
        for handle in found:
            origin, member = handles.origin(handle), step.member_of(handle)
            is_map = step.entry["kind"] == "map"
            is_inside = origin.body is step if is_map else origin.step == step.entry["id"]
            if is_inside and member:
                inner[member.removeprefix(step.prefix)] = None
        wired: dict[str, Any] = {"depends_on": [*inner]} if inner else {}
        if options.skip_if is not None:
            wired["skip_if"] = handles.template(options.skip_if, f"{where}: skip_if")
        return wired

    def _made(self, step: Step, full: str, result: node_functions.Result) -> handles.Handle:
        origin = handles.Origin(
            self,
            body=step.around if step.prefix else step,
            what=f"{self.where}: {full!r}",
            step=step.entry["id"],
            node=full,
            keys=result.keys,
            stores=result.kind != "nothing",
        )
        if result.kind == "any":
            return handles.Handle(origin, {"$from": full, refs.VALUE: True})
        path = f"{full}.{node_functions.RESULT}" if result.kind == "value" else full
        return handles.Handle(origin, {"$from": path})

    def add_group(
        self, name: str, build: Callable[[], Any], given: object, options: Options
    ) -> Any:
        """Add a call of a pipeline: a step with the nodes that its function calls."""
        if self.group is not None and self.group.entry["kind"] in ("branch", "loop"):
            if options.id is not None or options.after or options.skip_if is not None:
                raise errors.InvalidWorkflow(
                    f"{self.where}: step {self.group.entry['id']!r}: pipeline {name!r} is not a "
                    "step of its own in an arm or a loop: give id, after and skip_if to its nodes"
                )
            with self._within(self.group, {**self.defaults, **options.extra}):
                return build()
        if self.group is not None:
            raise errors.InvalidWorkflow(
                f"{self.where}: pipeline {name!r} is called in the pipeline of step "
                f"{self.group.entry['id']!r}: a pipeline holds nodes; call it in the workflow"
            )
        step, where = self.begin("pipeline", name, given, options)
        with self._within(step, options.extra):
            made = build()
        if not step.nodes:
            raise errors.InvalidWorkflow(f"{where}: pipeline {name!r} calls no node")
        if made is not None:
            return made
        origin = handles.Origin(
            self, what=f"{where}: pipeline {name!r}", step=step.entry["id"], stores=False
        )
        return handles.Handle(origin, {"$from": step.entry["id"]})

    @contextmanager
    def deciding_step(self, kind: str, value: object, options: Options) -> Generator[Step]:
        """Open a step of kind `branch` or `loop`; nodes that the block calls are its nodes.

        In a mapped pipeline it is a step of the map's body.
        """
        around = self.group
        if around is not None and around.entry["kind"] != "map":
            raise refused(self.where, around, f"{kind}() is called")
        step, _ = self.begin(kind, kind, value, options)
        with self._within(step, self.defaults):
            yield step

    @contextmanager
    def _within(self, step: Step, defaults: Mapping[str, Any]) -> Generator[None]:
        """Add the nodes that the block calls to a step; `defaults`: keys of their entries."""
        outer = self.group, self.defaults
        self.group, self.defaults = step, defaults
        try:
            yield
        finally:
            self.group, self.defaults = outer

    def add_run(
        self, workflow: str, given: dict[str, Any], options: Options, *, waits: bool, stores: bool
    ) -> handles.Handle:
        """Add a step of kind `run`; return a handle on the run's output, or on its id.

        While a map is built, each of its items has such a step.
        """
        step, where = self.begin("run", step_name(workflow), given, options)
        step.entry["workflow"] = workflow
        if not waits:
            step.entry["wait"] = False
        step.inputs |= _templates(given, where)
        own = step.entry["id"]
        path = f"{own}.{node_functions.RESULT}" if stores else own
        return handles.Handle(step.output(self, what=where, stores=stores), {"$from": path})

    def add_map(
        self,
        name: str,
        items: object,
        settings: Mapping[str, Any],
        build: Callable[[handles.Handle], Any],
        options: Options,
    ) -> handles.Handle:
        """Add a map: `build` is called with the placeholder of an item, and calls its nodes."""
        if self.group is not None:
            raise refused(self.where, self.group, f"{name!r} is mapped")
        step, where = self.begin("map", name, items, options)
        own = step.entry["id"]
        step.outer.clear()
        step.entry["over"] = handles.template(items, f"{where}: the list")
        step.entry |= {key: value for key, value in settings.items() if value is not None}
        item = handles.Origin(self, what=f"{where}: an item", body=step)
        with self._within(step, options.extra):
            made = build(handles.Handle(item, {"$from": graph.MAP_ITEM}))
        stores = _end_map(step, made, where)
        return handles.Handle(
            handles.Origin(self, what=where, step=own, node=own, stores=stores),
            {"$from": f"{own}.{graph.MAP_RESULTS}"},
        )

    def add_question(self, keys: Mapping[str, Any], target: str, options: Options) -> Any:
        """Add a step that asks a person; return a handle on the answer."""
        if self.group is not None:
            raise errors.InvalidWorkflow(
                f"{self.where}: step {self.group.entry['id']!r}: a pipeline cannot ask a person; "
                "call ask() in the workflow"
            )
        step, where = self.begin("input", "ask", dict(keys), options)
        own = step.entry["id"]
        step.entry |= {**_templates(keys, where), "target": target}
        origin = handles.Origin(self, what=where, step=own, node=own)
        return handles.Handle(origin, {"$from": f"{own}.{target}"})

    def of_run(self, key: str) -> handles.Handle:
        """Return a handle on an input of the run."""
        if not key or "." in key:
            raise errors.InvalidWorkflow(f"{self.where}: {key!r} is not a key: a ref splits at '.'")
        origin = handles.Origin(self, what=f"{self.where}: the run's {key!r}")
        return handles.Handle(origin, {"$from": key})

    @property
    def where(self) -> str:
        """Return the name of this workflow for messages."""
        return f"workflow {self.name!r}"

    def begin(self, kind: str, name: str, given: object, options: Options) -> tuple[Step, str]:
        """Return a new step that waits for the handles in `given` and `options`, and its name."""
        step = self._open(options.id, name, kind)
        where = f"{self.where}: step {step.entry['id']!r}"
        step.wait_for(self.found((given, options.skip_if), where))
        step.wait_for(self._waited(options.after, where))
        if options.skip_if is not None:
            step.entry["skip_if"] = handles.template(options.skip_if, f"{where}: skip_if")
        return step, where

    def _open(self, step_id: str | None, name: str, kind: str) -> Step:
        around, taken = self.group, dict[str, Any](self.steps)
        if around is not None:
            taken = dict(around.members)
            if kind != "run":  # origins tell the map's own nodes from the nodes of its members
                taken[around.entry["id"]] = None
        step = Step(_free(step_id, name, taken, self.where, "steps"), kind, around)
        (self.steps if around is None else around.members)[step.entry["id"]] = step
        return step

    def found(self, value: object, where: str) -> list[handles.Handle]:
        """Return the handles in a value, which must belong to this graph."""
        found = list(handles.inside(value))
        for handle in found:
            if handles.origin(handle).graph is not self:
                raise errors.InvalidWorkflow(
                    f"{where}: {handles.origin(handle).what} belongs to another graph"
                )
            around = None if self.group is None else self.group.around
            if handles.origin(handle).body not in (None, self.group, around):
                raise errors.InvalidWorkflow(
                    f"{where}: {handles.origin(handle).what} exists for each item of a map: use "
                    "the result of map()"
                )
        return found

    def _waited(self, after: tuple[object, ...], where: str) -> list[handles.Handle]:
        found: list[handles.Handle] = []
        for each in after:
            these = self.found(each, where)
            if not any(handles.origin(handle).step for handle in these):
                raise errors.InvalidWorkflow(
                    f"{where}: 'after' takes results of calls of nodes, pipelines or ask()"
                )
            found += these
        return found


def _templates(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {key: handles.template(value, f"{where}: {key!r}") for key, value in given.items()}


def _end_map(step: Step, made: Any, where: str) -> bool:
    """Set the result of a map's items; return whether they have one."""
    if not step.members:
        raise errors.InvalidWorkflow(f"{where}: its function calls no node")
    for head in sorted(step.outer & {*step.members, *step.node_ids(), graph.MAP_ITEM}):
        raise errors.InvalidWorkflow(
            f"{where}: {head!r} is in it and outside of it: give one another name, a node by "
            "options(id=...)"
        )
    if made is None:
        return False
    if not isinstance(made, handles.Handle) or handles.head(made) not in step.members:
        raise errors.InvalidWorkflow(
            f"{where}: the mapped function has to return the output of a node that it calls"
        )
    if not handles.origin(made).stores:
        return False
    step.entry["result"] = {"$from": handles.template(made, where)["$from"]}
    return True


def step_name(workflow: str) -> str:
    """Return the name of a step that runs this workflow."""
    return workflow.rpartition(".")[2]


def _free(wanted: str | None, name: str, taken: dict[str, Any], where: str, noun: str) -> str:
    """Return the requested id; without one the name, with a number if it is taken: `name-2`."""
    chosen = name if wanted is None else wanted
    if "." in str(chosen):
        raise errors.InvalidWorkflow(
            f"{where}: the id {chosen!r} has a '.', which separates the parts of a ref: give one "
            "without it, such as options('an-id')"
        )
    if wanted is not None:
        if wanted in taken:
            raise errors.InvalidWorkflow(f"{where}: two {noun} have the id {wanted!r}")
        return wanted
    if name not in taken:
        return name
    most = 2
    while f"{name}-{most}" in taken:
        most *= 2
    # Numbers of one name are assigned in order, so the free ones are behind those that are taken.
    numbers = range(2, most + 1)
    place = bisect.bisect_left(numbers, True, key=lambda each: f"{name}-{each}" not in taken)
    return f"{name}-{numbers[place]}"


def refused(where: str, group: Step, what: str) -> errors.InvalidWorkflow:
    """Return the error about a call that a group of nodes cannot contain, with the remedy."""
    step = group.entry["id"]
    if group.entry["kind"] == "map":
        return errors.InvalidWorkflow(
            f"{where}: step {step!r}: {what} in a mapped pipeline, which contains nodes, branches "
            "and loops; make it a @workflow and map that, as in `publish.map(items)`: each item is "
            "a run of its own"
        )
    return errors.InvalidWorkflow(
        f"{where}: step {step!r}: {what} in a pipeline, an arm or a loop; call it in the workflow"
    )
