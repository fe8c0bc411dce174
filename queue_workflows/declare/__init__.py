"""Declare nodes and workflows as Python functions, which compile to JSON definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast, get_origin, overload

from queue_workflows import config, errors
from queue_workflows.dag import answers, branches
from queue_workflows.declare import building, callables, compiling, handles, node_functions
from queue_workflows.declare.callables import Node, NodeOptions, Pipeline, Workflow
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
S = TypeVar("S")
T = TypeVar("T")

OFFERED: Any = node_functions.Offered()
"""Default for `out`, `scratch`, `cancel_event` and the like: the worker passes them."""


_OWN_OPTIONS = ("name", "queue", "model", "isolation", "version")
_ANSWER_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
_UNTIL = (
    "until takes the state and returns a part of it (r['ok']), a comparison by == or != "
    "(r['left'] == 0), or what a node returns (until=is_good)"
)
_RETURNS = (
    "the repeated function returns the output of a node that it calls, which is the next state"
)
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

    `model` is the model that a gpu worker loads for it; it puts the node on the gpu queue. A
    returned dict is the node's outputs; anything else is its one output; None is no output.
    `isolation="process"`: each of its jobs has a fresh process, in a worker with slots. `version`:
    of its code; workers with another version leave its jobs. The other options are its policy.
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
    `keys` what it needs; `answer` is the answer's type. An answer is refused unless it is the text,
    number, truth value, list or dict that `answer` says; only type checkers know other types.
    """
    graph = compiling.needed("ask()")
    question: dict[str, Any] = {"widget": widget}
    if prompt is not None:
        question["prompt"] = prompt
    if named := _ANSWER_TYPES.get(get_origin(answer) or answer):
        question[answers.TYPE] = named
    options = callables.of_call(id, id, after, skip_if)
    return cast("T", graph.add_question({**question, **keys}, target, options))


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
    """Register these nodes and workflows, and all in the namespaces of these modules.

    Without arguments, register every one that this process has declared. Declaring registers them
    already; this restores them after `config.reset_for_tests()`.
    """
    for thing in things or tuple(_declared.values()):
        held = list(vars(thing).values()) if isinstance(thing, ModuleType) else [thing]
        for each in held:
            if isinstance(each, (Node, Workflow)):
                cast("Node[..., Any] | Workflow[..., Any]", each).install()


# --- Steps that decide which of their nodes run.


class _End(NamedTuple):
    """The last node of an arm (relative to its step), and whether the branch has its one value."""

    node: str
    is_value: bool
    origin: handles.Origin


def branch(
    value: object,
    arms: Mapping[Any, Callable[..., R]],
    other: Callable[..., S] | None = None,
    *,
    id: str | None = None,  # noqa: A002  the definition's word
    after: Iterable[object] = (),
    skip_if: object = None,
) -> R | S:
    """Run the arm of a value; return the arm's output. Nodes of the other arms are skipped.

    `arms` has a node, a pipeline, or a function that calls nodes, by the value: a text, a whole
    number, a boolean or None. `other` is the arm of every other value; without it the run fails. An
    arm with a parameter that has no default gets the value from which `value` was selected: `cut`
    for `cut["kind"]`.
    """
    graph = compiling.needed("branch()")
    options = callables.of_call("branch", id, after, skip_if)
    with graph.deciding_step("branch", value, options) as step:
        where = f"{graph.where}: step {step.entry['id']!r}"
        if not arms:
            raise errors.InvalidWorkflow(f"{where}: a branch needs an arm: branch(x, {{'a': f}})")
        if not isinstance(value, handles.Handle):
            raise errors.InvalidWorkflow(
                f"{where}: branch() takes a value of the run, not {value!r:.80}: choose in Python "
                "what is known while the graph is built"
            )
        given = handles.selected_from(value)
        made: dict[Callable[..., Any], _End] = {}
        ends: dict[str, _End] = {}
        for raw, arm in arms.items():
            key = branches.key_of(raw)
            if key is None or key in ends:
                raise errors.InvalidWorkflow(
                    f"{where}: {raw!r:.80} cannot be the key of an arm: keys are texts, whole "
                    "numbers, booleans and None, and differ from each other as texts"
                )
            ends[key] = _end(step, arm, given, made, f"{where}: arm {key!r}")
        if other is not None:
            step.entry["other"] = _end(step, other, given, made, f"{where}: other").node
    step.entry["on"] = handles.template(value, f"{where}: its value")
    step.entry["arms"] = {key: end.node for key, end in ends.items()}
    return cast("Any", _output(graph, step, [*made.values()], where))


def _end(
    step: building.Step,
    arm: Callable[..., Any],
    given: handles.Handle,
    made: dict[Callable[..., Any], _End],
    where: str,
) -> _End:
    """Call an arm, once if several values have it; return its last node."""
    if arm in made:
        return made[arm]
    if not callable(arm):
        raise errors.InvalidWorkflow(f"{where}: {arm!r:.80} is no node, pipeline or function")
    found = arm(given) if callables.takes_one(arm) else arm()
    origin = handles.origin(found) if isinstance(found, handles.Handle) else None
    node = origin.node if origin is not None else None
    if origin is None or node is None or origin.step != step.entry["id"]:
        raise errors.InvalidWorkflow(
            f"{where}: an arm returns the output of a node that it calls, all of it"
        )
    path = handles.template(found, where)["$from"] if origin.stores else node
    if path not in (node, f"{node}.{node_functions.RESULT}"):
        raise errors.InvalidWorkflow(
            f"{where}: an arm returns all of a node's output: select a part after the branch"
        )
    made[arm] = _End(node.partition("/")[2], path != node, origin)
    return made[arm]


def _output(
    graph: building.Graph, step: building.Step, ends: list[_End], where: str
) -> handles.Handle:
    stored = [end for end in ends if end.origin.stores]
    if len({end.is_value for end in stored}) > 1:
        listed = ", ".join(f"{end.node}: {'a value' if end.is_value else 'a dict'}" for end in ends)
        raise errors.InvalidWorkflow(
            f"{where}: its arms return dicts and other values ({listed}): use one kind for all"
        )
    keys = [end.origin.keys for end in stored]
    known = None if None in keys else frozenset[str]().union(*(key or () for key in keys))
    own = step.entry["id"]
    is_value = bool(stored) and stored[0].is_value
    origin = step.output(graph, what=where, keys=known, stores=bool(stored))
    return handles.Handle(origin, {"$from": f"{own}.{node_functions.RESULT}" if is_value else own})


def loop(
    body: Callable[..., R],
    *,
    start: object,
    until: Callable[[R], object],
    at_most: int,
    must: bool = True,
    id: str | None = None,  # noqa: A002  the definition's word
    after: Iterable[object] = (),
    skip_if: object = None,
) -> R:
    """Run `body` again with its last result until `until` holds; return the last state.

    `body`: a node, a pipeline, or a function that calls nodes, with the state as its argument.
    `start` is the first state. `until` is called once, while the graph is built. After `at_most`
    rounds (1 to 1000) the run fails; with `must=False` the last state counts.
    """
    graph = compiling.needed("loop()")
    options = callables.of_call("loop", id, after, skip_if)
    with graph.deciding_step("loop", start, options) as step:
        own = step.entry["id"]
        where = f"{graph.where}: step {own!r}"
        if not callables.takes_one(body):
            raise errors.InvalidWorkflow(
                f"{where}: the repeated function needs a parameter, which takes the state"
            )
        place = handles.Origin(graph, what=where, step=own, body=step.around)
        state = handles.Handle(place, {"$from": own})
        found = body(state)
        origin = handles.origin(found) if isinstance(found, handles.Handle) else None
        if origin is None or origin.node is None or origin.step != own or not origin.stores:
            raise errors.InvalidWorkflow(f"{where}: {_RETURNS}")
        result = handles.template(found, where)["$from"]
        step.entry["until"] = _condition(until, found, where)
    first = handles.template(start, f"{where}: start")
    step.entry.update(start=first, result=result.removeprefix(f"{own}/"), at_most=at_most)
    if not must:
        step.entry["must"] = False
    made = step.output(graph, what=where, keys=origin.keys)
    return cast("R", handles.Handle(made, {"$from": own + result.removeprefix(origin.node)}))


def _condition(until: Callable[[R], object], state: R, where: str) -> Any:
    try:
        found = until(state)
    except errors.InvalidWorkflow as error:
        if "has no value" not in str(error):
            raise
        raise errors.InvalidWorkflow(f"{where}: {_UNTIL}; other conditions: a node") from error
    if not isinstance(found, handles.Handle):
        raise errors.InvalidWorkflow(f"{where}: until returned {found!r:.80}: {_UNTIL}")
    return handles.template(found, f"{where}: until")
