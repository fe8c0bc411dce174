"""Check a graph's nodes against the functions, models and workflows of this process."""

from __future__ import annotations

import graphlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from queue_workflows import config, errors, model_registry
from queue_workflows.check import documents, findings
from queue_workflows.check.findings import Finding
from queue_workflows.dag import graph, typed_values
from queue_workflows.declare import compiling, node_functions

MAX_WORKFLOWS = 1000
"""Workflows that are read for one check."""
IN_NO_CODE = "register_node() it, declare it by @node, or check with --app"


class _Unresolvable(NamedTuple):
    """Why a module cannot be resolved."""

    message: str
    remedy: str


class NodeFunctions:
    """Resolve the module of each node once; `outputs` are the known keys of its result."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._outputs: dict[str, frozenset[str] | None] = {}

    def check(self, node: graph.Node) -> Iterator[Finding]:
        """Return whether the node's module resolves, and takes the node's inputs."""
        at = f"node {node.id!r}"
        own = (node.step, node.choice, node.loop, node.map)
        if graph.is_engine(node.module) or any(each is not None for each in own):
            return
        if node.module not in self._found:
            self._found[node.module] = _resolved(node.module)
        found = self._found[node.module]
        if isinstance(found, _Unresolvable):
            yield findings.error(at, found.message, found.remedy)
        else:
            yield from _arguments(node, found, at)
            # No input can ever fit some annotations of a function that `@node` declares.
            unfit = found.unfit_inputs if isinstance(found, node_functions.NodeFunction) else {}
            for name in filter(unfit.__contains__, node.inputs):
                yield findings.error(
                    at,
                    f"{node.module!r} takes {name!r}: {unfit[name]}",
                    "annotate it with a type that inputs can have",
                )

    def outputs(self, node: graph.Node) -> frozenset[str] | None:
        """Return the keys of a node's result; None if unknown."""
        if node.step is not None:
            target = node.step.get("target")
            return frozenset({target} if isinstance(target, str) else ())
        if node.choice is not None or node.loop is not None:
            return None
        if node.map is not None:
            return graph.MAP_OUTPUTS
        found = self._found.get(node.module)
        if found is None or isinstance(found, _Unresolvable):
            return None
        if node.module not in self._outputs:
            self._outputs[node.module] = node_functions.outputs(found)
        return self._outputs[node.module]


def _resolved(name: str) -> Any:
    """Return the function of a node, or why it has none."""
    cfg = config.get_config()
    try:
        module = cfg.resolve_node_module(name)
        run = getattr(module, "run", None)  # of a module that may import it only now
    except errors.NodeNotFound as error:
        elsewhere = cfg.node_resolver is not None or cfg.node_module_package is not None
        return _Unresolvable(
            str(error)
            if elsewhere
            else f"node module {name!r} is not registered{cfg.node_hint(name)}",
            IN_NO_CODE,
        )
    except (Exception, SystemExit) as error:  # noqa: BLE001  boundary around app code
        return _Unresolvable(f"module {name!r} does not load: {_describe(error)}", "fix the module")
    if not callable(run):
        return _Unresolvable(
            f"module {name!r} has no run(){cfg.node_hint(name)}", "define run(...) in it"
        )
    return module


def _describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        file = (error.filename or "").replace("\\", "/").rpartition("/")[2]
        return f"SyntaxError: {error.msg} ({file}, line {error.lineno})"
    return compiling.described(error)


def _arguments(node: graph.Node, module: Any, at: str) -> Iterator[Finding]:
    try:
        parameters = inspect.signature(module.run).parameters.values()
    except (TypeError, ValueError):
        return
    takes = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    whole = "inputs" in takes or any(p.kind is p.VAR_KEYWORD for p in parameters)
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY:
            yield findings.error(
                at,
                f"{node.module!r} takes {each.name!r} by position alone",
                "inputs are bound by name: remove the '/'",
            )
        needed = each.default is each.empty and each.name in takes
        if needed and each.name not in node.inputs and each.name not in node_functions.OFFERS:
            yield findings.error(
                at,
                f"{node.module!r} needs {each.name!r}, and the node has no such input",
                f"add it to its inputs ({findings.listed(node.inputs)}), or give it a default",
            )
        elif (
            needed
            and node.inputs.get(each.name, "") is None
            and not re.search("None|Optional", str(each.annotation))
        ):
            yield findings.warning(
                at,
                f"{node.module!r} needs {each.name!r}, and gets None",
                "give it in the step's inputs, or give the parameter a default",
            )
    wanted = [name for name in takes if name not in node_functions.OFFERS or name in node.inputs]
    for name in node.inputs:
        if name not in takes and not whole:
            meant = errors.closest(name, wanted)
            yield findings.error(
                at,
                f"{node.module!r} takes no {name!r}",
                f"did you mean {meant!r}?" if meant else f"it takes {findings.listed(wanted)}",
            )
    for name in sorted(typed_values.ENGINE_OBJECTS & node.inputs.keys() & set(takes)):
        yield findings.warning(
            at, f"{node.module!r} gets the engine's {name!r}, not the input", "rename the input"
        )
    if "model_handle" in takes and node.model is None:
        yield findings.warning(
            at, f"{node.module!r} asks for model_handle, and gets None", "name the node's model"
        )


def places(node: graph.Node, known_models: frozenset[str] | str) -> Iterator[Finding]:
    """Check whether the model exists; a text instead of models: why they are unknown."""
    at = f"node {node.id!r}"
    if node.model is None:
        return
    if isinstance(known_models, str):
        yield findings.error(at, f"model {node.model!r}: {known_models}", "fix the registrar")
    elif node.model not in known_models:
        yield findings.error(
            at,
            f"unknown model {node.model!r}; registered are {findings.listed(sorted(known_models))}"
            f"{errors.hint(node.model, known_models)}",
            "model_registry.register() it, or let set_builtin_model_registrar() do so",
        )


def known_models() -> frozenset[str] | str:
    """Return the registered models, after calling the app's registrar, or why that raised."""
    try:
        config.get_config().builtin_model_registrar()
    except (Exception, SystemExit) as error:  # noqa: BLE001  boundary around app code
        return f"the registrar of models raised {_describe(error)}"
    return frozenset(model_registry.known_ids())


def child_runs(name: str, nodes: Iterable[graph.Node]) -> Iterator[Finding]:
    """Yield a finding for each child that is unknown, and for each cycle or too deep a chain."""
    known: dict[str, list[str] | None] = {}
    for node in nodes:
        workflow = graph.workflow_of(node.module)
        if workflow is None:
            continue
        at, calls = f"node {node.id!r}", _calls(workflow, known)
        if known[workflow] is None:
            yield findings.error(
                at,
                f"workflow {workflow!r} is not known here",
                "declare it by @workflow, let the provider have it, or check with --app",
            )
        elif path := graph.find_cycle({name: [workflow], **calls}):
            yield findings.error(
                at,
                f"a cycle of child runs: {' -> '.join(path)}",
                "a run whose child calls its parent never ends: use a loop or a map",
            )
        elif (depth := _depth(calls)) > graph.MAX_RUN_DEPTH:
            yield findings.error(
                at,
                f"child runs are nested {depth} deep",
                f"at most {graph.MAX_RUN_DEPTH}: let one workflow call the nodes of another",
            )


def _calls(workflow: str, known: dict[str, list[str] | None]) -> dict[str, list[str]]:
    """Return the workflows that one calls, directly or not; add them to `known`.

    A workflow that cannot be read has None in `known`.
    """
    found: dict[str, list[str]] = {}
    waiting = [workflow]
    while waiting:
        each = waiting.pop()
        if each not in known:
            known[each] = _called(each) if len(known) < MAX_WORKFLOWS else []
        if each not in found:
            found[each] = known[each] or []
            waiting += found[each]
    return found


def _depth(calls: Mapping[str, list[str]]) -> int:
    """Return how many runs are below each other, in calls without a cycle."""
    depths: dict[str, int] = {}
    for each in graphlib.TopologicalSorter(calls).static_order():
        depths[each] = 1 + max((depths[called] for called in calls[each]), default=0)
    return max(depths.values())


def _called(name: str) -> list[str] | None:
    load = config.get_config().workflow_loader
    if load is None:
        return None
    try:
        document: Any = load(name)
    except (Exception, SystemExit):  # noqa: BLE001  boundary around app code
        return None
    try:
        steps = [*documents.steps(document)]
    except (AttributeError, KeyError, TypeError, RecursionError):  # this one cannot run
        return []
    return [str(step.get("workflow")) for step in steps if step.get("kind") == "run"]
