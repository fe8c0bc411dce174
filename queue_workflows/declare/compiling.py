"""Call a workflow's function once, and return the documents of the graph that its calls build."""

from __future__ import annotations

import contextvars
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from queue_workflows import errors
from queue_workflows.dag import typed_values
from queue_workflows.declare import building, handles, node_functions

current: contextvars.ContextVar[building.Graph | None] = contextvars.ContextVar(
    "graph", default=None
)
"""The graph that is being built here."""
_NO_APP = {"queue_workflows", *sys.stdlib_module_names}


class Compiled(NamedTuple):
    """A workflow as documents, as `set_workflow_provider`'s two functions would return them."""

    document: dict[str, Any]
    pipelines: dict[str, dict[str, Any]]
    run_inputs: dict[str, Any]
    """The keys that `run_input` names, with their types."""
    has_output: bool = False


def needed(what: str) -> building.Graph:
    """Return the graph that is being built; raise `InvalidConfig` outside a workflow's function."""
    graph = current.get()
    if graph is None:
        raise errors.InvalidConfig(f"{what} can only be called in the function of a workflow")
    return graph


def needs_of(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the parameters of a workflow's function: the required keys of a run's inputs."""
    parameters = inspect.signature(function).parameters.values()
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise errors.InvalidConfig(
                f"workflow {name!r}: {each.name!r}: a parameter is the name of an input of the "
                "run, so *args, **kwargs and parameters without a name are refused"
            )
        if each.default is not each.empty:
            raise errors.InvalidConfig(
                f"workflow {name!r}: {each.name!r} has a default, which a ref to the run's inputs "
                "cannot have: give it to the parameter of a node"
            )
    return tuple(each.name for each in parameters)


def build(function: Callable[..., Any], name: str, needs: Iterable[str]) -> Compiled:
    """Return the documents of a workflow, whose function has the parameters `needs`.

    Raises `InvalidWorkflow`, also for what its function raises.
    """
    above = current.get()
    callers = () if above is None else (*above.callers, above.name)
    if name in callers:
        path = [*callers[callers.index(name) :], name]
        raise errors.InvalidWorkflow(
            f"workflow {name!r} calls itself: {' -> '.join(path)}; its runs would never end"
        )
    graph = building.Graph(name, callers)
    scope = typed_values.scope_of(function)
    for key, each in inspect.signature(function).parameters.items():
        if (reason := typed_values.unfit(typed_values.read(each.annotation, scope))) is not None:
            raise errors.InvalidWorkflow(f"workflow {name!r}: {key!r}: {reason}")
    token = current.set(graph)
    try:
        returned = function(**{key: graph.of_run(key) for key in needs})
    except errors.InvalidWorkflow as error:
        hint = _undeclared(error, function)
        if not hint or hint in str(error):
            raise
        raise errors.InvalidWorkflow(f"{error}{hint}") from error
    except errors.QueueWorkflowsError:
        raise
    except Exception as error:
        # A function that uses a handle like a value fails on an attribute that the handle lacks.
        misused = isinstance(error, (AttributeError, TypeError))
        hint = _undeclared(error, function) if misused else ""
        text = f"{graph.where}: its function raised {described(error)}{hint}"
        raise errors.InvalidWorkflow(text) from error
    finally:
        current.reset(token)
    if not graph.steps:
        raise errors.InvalidWorkflow(
            f"{graph.where}: its function calls no node: a function that is to run later needs "
            "@node"
        )
    return _compiled(graph, needs, returned)


def _undeclared(error: Exception, function: Callable[..., Any]) -> str:
    """Return a hint if a function of the app without `@node` raised, or was used like a node."""
    used = error.obj if isinstance(error, AttributeError) else None
    found = [f"{used.__name__}()"] if inspect.isfunction(used) else []
    trace = None if found else error.__traceback__
    while trace is not None:
        code, names = trace.tb_frame.f_code, trace.tb_frame.f_globals
        own, package = names.get(code.co_name), str(names.get("__name__")).partition(".")[0]
        is_of_app = package not in _NO_APP and "site-packages" not in code.co_filename
        if is_of_app and own is not function and getattr(own, "__code__", None) is code:
            found.append(f"{code.co_name}()")
        trace = trace.tb_next
    shown = " or ".join(dict.fromkeys(found))
    return f"; if {shown} is a node, declare it by @node" if found else ""


def described(error: BaseException) -> str:
    """Return an error's type, text and innermost place."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        file = trace.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
        place = f" ({file}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _compiled(graph: building.Graph, needs: Iterable[str], returned: object = None) -> Compiled:
    """Return the documents. Raises `InvalidWorkflow` if a step hides an input of the run.

    `returned`: the value that the workflow's function returned, the output of its runs.
    """
    for key in (*needs, *graph.run_inputs):
        if key in graph.steps and graph.steps[key].entry["kind"] != "pipeline":
            raise errors.InvalidWorkflow(
                f"{graph.where}: the step {key!r} and the run's {key!r} have one name in refs: "
                "give the step another id"
            )
    pipelines: dict[str, dict[str, Any]] = {}
    for step_id, step in graph.steps.items():
        _complete(step, f"{graph.name}.{step_id}", pipelines)
    steps = [step.entry for step in graph.steps.values()]
    for kind, entries in (("step", steps), *(("node", p["nodes"]) for p in pipelines.values())):
        for entry in entries:
            if (text := handles.shown_in(entry)) is not None:
                raise errors.InvalidWorkflow(
                    f"{graph.where}: {kind} {entry['id']!r}: {text!r:.200} shows an output, which "
                    "has no value while the graph is built: make the text inside a node"
                )
    document: dict[str, Any] = {"name": graph.name, "steps": steps}
    stores = any(handles.origin(each).stores for each in graph.found(returned, graph.where))
    if stores:
        output = handles.template(returned, f"{graph.where}: what it returns")
        document["output"] = {node_functions.RESULT: output}
    return Compiled(document, pipelines, graph.run_inputs, stores)


def _complete(step: building.Step, name: str, pipelines: dict[str, dict[str, Any]]) -> None:
    """Complete the entry of a step, and add its pipeline under this `name`."""
    decides = any(member is not None for member in step.members.values())
    if decides:
        step.entry["steps"] = entries = list[dict[str, Any]]()
        for key, member in step.members.items():
            if member is not None:  # a branch or loop in the body of a map
                _complete(member, f"{name}/{key}", pipelines)
            entries.append(_node_step(step, key) if member is None else member.entry)
    elif step.nodes:
        step.entry["pipeline"] = name
        pipelines[name] = {"name": name, "nodes": list(step.nodes.values())}
    if step.inputs and not decides:
        step.entry["inputs"] = step.inputs
    if step.deps:
        step.entry["depends_on"] = list(step.deps)


def _node_step(step: building.Step, node_id: str) -> dict[str, Any]:
    """Return a node of a map's body as a step of kind `node`."""
    entry: dict[str, Any] = {"id": node_id, "kind": "node", **step.nodes[node_id]}
    listed: list[dict[str, str]] = entry.pop("inputs", [])
    if listed:
        entry["inputs"] = {
            each["name"]: step.inputs[each["from"].removeprefix("pipeline.")] for each in listed
        }
    return entry
