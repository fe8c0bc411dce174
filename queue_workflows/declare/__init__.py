"""Declare nodes and workflows as Python functions, which compile to JSON definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_origin, overload

from queue_workflows import config, errors
from queue_workflows.dag import answers
from queue_workflows.declare import building, callables, compiling, node_functions
from queue_workflows.declare.callables import Node, NodeOptions, Pipeline, Workflow
from queue_workflows.declare.control_flow import branch, loop
from queue_workflows.declare.handles import FailedItem, failures, filtered
from queue_workflows.tasks import registry
from queue_workflows.tasks.registry import Backoff, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "OFFERED", "Backoff", "FailedItem", "Node", "Pipeline", "Policy", "Workflow", "ask", "branch",
    "declared_in", "failures", "filtered", "install", "loop", "node", "pipeline", "run_input",
    "workflow",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

OFFERED: Any = node_functions.Offered()
"""Default for `out`, `scratch`, `cancel_event` and the like: the worker passes them."""


_OWN_OPTIONS = ("name", "queue", "model", "isolation", "version")
_ANSWER_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
_declared: dict[tuple[str, str, str], Node[..., Any] | Workflow[..., Any]] = {}


def _add(thing: Any, kind: str, place: tuple[str, str]) -> Any:
    thing.install()
    _declared[(kind, *place)] = thing
    return thing


@overload
def node(function: Callable[P, R], /) -> Node[P, R]: ...
@overload
def node(**options: Unpack[NodeOptions]) -> Callable[[Callable[P, R]], Node[P, R]]: ...
def node(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declare a function as a node; the function's name is the node's, unless `name` is given.

    `model` is what a gpu worker loads for it; it puts the node on the gpu queue. A returned dict is
    the node's outputs; anything else is its one output; None is no output. `isolation="process"`:
    each of its jobs has a fresh process, in a worker with slots. `version`: that of its code;
    workers with another version leave its jobs. The other options are its policy.
    """
    name, queue, model, isolation, version = (options.pop(key, None) for key in _OWN_OPTIONS)

    def declare(function: Callable[..., Any]) -> Node[..., Any]:
        made = node_functions.NodeFunction(
            function, name or getattr(function, "__name__", repr(function))
        )
        config.check_version(f"node {made.name!r}", version)
        made.isolation, made.version = isolation, version
        if queue not in (None, "cpu", "gpu"):
            raise errors.UnknownQueue(
                f"node {made.name!r}: unknown queue {queue!r}: a node runs on cpu or gpu"
            )
        if model is not None and queue == "cpu":
            raise errors.InvalidConfig(f"node {made.name!r}: a model needs queue='gpu'")
        made.queue = "cpu" if model is None and queue != "gpu" else "gpu"
        entry: dict[str, Any] = {"gpu": True} if made.queue == "gpu" else {}
        if model is not None:
            entry["model"] = model
        entry |= registry.named_errors(options, Policy, repr(made.name))
        return _add(Node[..., Any](made, entry), "node", made.place)

    return declare if function is None else declare(function)


@overload
def pipeline(function: Callable[P, R], /) -> Pipeline[P, R]: ...
@overload
def pipeline(*, name: str) -> Callable[[Callable[P, R]], Pipeline[P, R]]: ...
def pipeline(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Declare a function that calls nodes as a step; its return value is the call's value."""

    def declare(function: Callable[..., Any]) -> Pipeline[..., Any]:
        return Pipeline(function, name or function.__name__)

    return declare if function is None else declare(function)


@overload
def workflow(function: Callable[P, R], /) -> Workflow[P, R]: ...
@overload
def workflow(*, name: str) -> Callable[[Callable[P, R]], Workflow[P, R]]: ...
def workflow(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Declare a function as a workflow: it is called once to build the graph, and computes nothing.

    Its parameters are the keys of a run's inputs. A node's call returns a placeholder for its
    outputs. Other nodes take it as an input, and then wait for the node.
    """

    def declare(function: Callable[..., Any]) -> Workflow[..., Any]:
        made = Workflow(function, name or function.__name__)
        return _add(made, "workflow", made.place)

    return declare if function is None else declare(function)


def ask(
    id: str,  # noqa: A002  the definition's word
    widget: str,
    answer: type[T] = cast("type[Any]", object),
    *,
    target: str = "answer",
    prompt: str | None = None,
    after: Iterable[object] = (),
    skip_if: object = None,
    **keys: Any,
) -> T:
    """Add a step that asks a person; return its answer, which other nodes take as an input.

    `widget` is a built-in one (choose_one, file_upload, pick_or_upload, turnout) or the app's,
    `keys` what it needs; `answer` is the answer's type. An answer that is no text, number, truth
    value, list or dict, as `answer` says, is refused; of other types only type checkers know.
    """
    graph = compiling.needed("ask()")
    question: dict[str, Any] = {"widget": widget}
    if prompt is not None:
        question["prompt"] = prompt
    if named := _ANSWER_TYPES.get(get_origin(answer) or answer):
        question[answers.TYPE] = named
    found = building.Options(id, callables.of_call(id, id, after, skip_if, {}).after, skip_if)
    return cast("T", graph.add_question({**question, **keys}, target, found))


def run_input(key: str, kind: type[T] = cast("type[Any]", object)) -> T:
    """Return the value under a key of the run's inputs that is not a parameter.

    A run may lack the key; a value that it has is checked against `kind`.
    """
    graph = compiling.needed("run_input()")
    graph.run_inputs[key] = Any if kind is object else kind
    return cast("T", graph.of_run(key))


def declared_in(module: str) -> list[Node[..., Any] | Workflow[..., Any]]:
    """Return the nodes and workflows that a module's functions declared, by module name."""
    return [thing for (_, owner, _), thing in _declared.items() if owner == module]


def install(*things: Node[..., Any] | Workflow[..., Any] | ModuleType) -> None:
    """Register nodes and workflows in this process; of a module, those that its names hold.

    Declaring does so already; this restores them after `config.reset_for_tests()`. Without
    arguments: all declared ones.
    """
    for thing in things or tuple(_declared.values()):
        held = list(vars(thing).values()) if isinstance(thing, ModuleType) else [thing]
        for each in held:
            if isinstance(each, (Node, Workflow)):
                cast("Node[..., Any] | Workflow[..., Any]", each).install()
