"""Declare nodes and workflows as Python functions, which compile to JSON definitions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from queue_workflows import config, errors
from queue_workflows.dag import policy as policies
from queue_workflows.dag import typed_values
from queue_workflows.declare import building, handles, node_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "OFFERED",
    "Backoff",
    "Node",
    "Pipeline",
    "Policy",
    "Workflow",
    "ask",
    "declared_in",
    "filtered",
    "install",
    "node",
    "pipeline",
    "run_input",
    "workflow",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
L = TypeVar("L", bound="list[Any]")

OFFERED: Any = node_functions.Offered()
"""Default for `out`, `scratch`, `cancel_event` and the like: the worker passes them."""


class Backoff(TypedDict, total=False):
    """The growth of the wait before another attempt; `jitter` is its random share."""

    kind: Literal["constant", "linear", "exponential"]
    base_s: float
    cap_s: float
    jitter: float


class Policy(TypedDict, total=False):
    """The policy of a node's jobs; each key is stored in the definition as it is given.

    `retry_on`, `discard_on`: errors by class or name; a class is stored by its name.
    """

    retries: int
    backoff: float | Backoff
    timeout_s: float
    retry_on: Iterable[str | type[BaseException]]
    discard_on: Iterable[str | type[BaseException]]
    priority: int
    lock_key: str


_POLICY = frozenset(Policy.__annotations__)


class Node(Generic[P, R]):
    """A function as a node. A call in a workflow adds a node; elsewhere it runs the function."""

    def __init__(self, function: node_functions.NodeFunction, entry: Mapping[str, Any]) -> None:
        self._function = function
        self._entry = entry
        self._options = building.Options()
        self.__doc__ = function.function.__doc__
        self.__name__ = function.function.__name__
        self.__module__ = function.function.__module__
        self.__wrapped__ = function.function

    @property
    def name(self) -> str:
        """Return the node's name in rows and definitions."""
        return self._function.name

    @property
    def function(self) -> Callable[P, R]:
        """Return the function as it was written."""
        return self._function.function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graph = building.current()
        if graph is None:
            return self._function.function(*args, **kwargs)
        where = f"{graph.where}: {self._options.id or self.__name__!r}"
        given = self._function.bind(where, args, dict(kwargs))
        return cast("R", graph.add_node(self._function, self._entry, given, self._options))

    def options(
        self,
        id: str | None = None,  # noqa: A002  the definition's word
        *,
        after: Iterable[object] = (),
        skip_if: object = None,
        **policy: Unpack[Policy],
    ) -> Node[P, R]:
        """Return the node with options for its next call: its step's or node's id, dependencies.

        `skip_if`: an output, or `output == x`, or `output != x`. The policy overrides the node's
        own.
        """
        made = Node[P, R](self._function, self._entry)
        made._options = _options(self.name, id, after, skip_if, policy)
        return made

    def install(self) -> None:
        """Register it by its name here; raise `InvalidConfig` if another node has that name."""
        owner = config.get_config().node_map.get(self.name)
        if isinstance(owner, node_functions.NodeFunction):
            _refuse_second("node", self.name, owner.place, self._function.place)
        config.register_node(self.name, self._function, isolation=self._function.isolation)

    def __repr__(self) -> str:
        return f"<node {self.name!r}>"


class Pipeline(Generic[P, R]):
    """A function that calls nodes. A call in a workflow adds a step with them."""

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.name = name
        self._function = function
        self._options = building.Options()
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graph = building.needed(f"pipeline {self.name!r}")
        given = (list(args), dict(kwargs))
        return graph.add_group(
            self.name, lambda: self._function(*args, **kwargs), given, self._options
        )

    def options(
        self,
        id: str | None = None,  # noqa: A002  the definition's word
        *,
        after: Iterable[object] = (),
        skip_if: object = None,
        **policy: Unpack[Policy],
    ) -> Pipeline[P, R]:
        """Return the pipeline with options for its next call.

        The policy is that of nodes without their own. `skip_if` counts for each node that has none.
        """
        made = Pipeline(self._function, self.name)
        made._options = _options(self.name, id, after, skip_if, policy)
        return made

    def __repr__(self) -> str:
        return f"<pipeline {self.name!r}>"


class Workflow(Generic[P]):
    """A function that calls nodes, pipelines and `ask`; its parameters are a run's context."""

    def __init__(self, function: Callable[P, object], name: str) -> None:
        self.name = name
        self.needs = building.needs_of(function, name)
        """The keys that a run's context must have."""
        self._inputs = building.inputs_of(function)
        self._function = function
        self._lock = threading.Lock()
        self._compiled: building.Compiled | None = None
        self.__doc__ = function.__doc__

    def document(self) -> dict[str, Any]:
        """Return the workflow in JSON: `{"name", "steps"}`. Raises `InvalidWorkflow`."""
        return self._built().document

    def pipelines(self) -> dict[str, dict[str, Any]]:
        """Return its pipelines by name, each `{"name", "nodes"}`. Raises `InvalidWorkflow`."""
        return self._built().pipelines

    def context(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Return the context of a run with these arguments, for `runs.submit(context=...)`."""
        bound = inspect.signature(self._function).bind(*args, **kwargs)
        return handles.constant(dict(bound.arguments), f"workflow {self.name!r}")

    def check_inputs(self, given: Any) -> None:
        """Raise `ArgsRefused` unless this is a valid context for a run of the workflow.

        The error names missing and unknown keys (with the closest known key) and wrong types.
        Values may be Python values or what JSON makes of them.
        """
        where = f"inputs of workflow {self.name!r}"
        typed_values.check_as_stored(self._check_stored, given, where)

    def _check_stored(self, given: Any, where: str) -> None:
        optional: Mapping[str, Any] = {}
        if isinstance(given, dict) and given.keys() - set(self.needs):
            try:
                optional = self._built().run_inputs
            except errors.InvalidWorkflow:
                return  # the run fails with this reason when it starts
        self._inputs.bound(given, where, optional)

    def accepts_input(self, key: str, value: Any) -> bool:
        """Return whether the value fits the parameter of this name; True if there is none."""
        return self._inputs.accepts(key, value)

    def install(self) -> None:
        """Add it to this process's provider; `InvalidConfig` if another one has that name."""
        known = config.get_config().workflow_map
        owner = known.get(self.name)
        if isinstance(owner, Workflow):
            _refuse_second("workflow", self.name, owner.place, self.place)
        known[self.name] = self

    @property
    def place(self) -> tuple[str, str]:
        """Return module and qualified name of the function."""
        return self._function.__module__, self._function.__qualname__

    def _built(self) -> building.Compiled:
        with self._lock:
            if self._compiled is None:
                self._compiled = building.build(self._function, self.name)
            return self._compiled

    def __repr__(self) -> str:
        return f"<workflow {self.name!r}>"


_declared: dict[tuple[str, str, str], Node[..., Any] | Workflow[...]] = {}


def _refuse_second(kind: str, name: str, owner: tuple[str, str], place: tuple[str, str]) -> None:
    if owner != place:
        raise errors.InvalidConfig(
            f"two {kind}s are named {name!r}: {'.'.join(owner)} and {'.'.join(place)}; "
            f"give one another by @{kind}(name=...)"
        )


def _add(thing: Any, kind: str, place: tuple[str, str]) -> Any:
    thing.install()
    _declared[(kind, *place)] = thing
    return thing


def _options(
    name: str,
    step_id: str | None,
    after: Iterable[object],
    skip_if: object,
    policy: Mapping[str, Any],
) -> building.Options:
    if isinstance(after, (str, Mapping, handles.Handle)):
        raise errors.InvalidWorkflow(f"{name!r}: after=[...] takes a list of outputs")
    return building.Options(step_id, tuple(after), skip_if, _policy(name, policy))


def _policy(name: str, policy: Mapping[str, Any]) -> dict[str, Any]:
    for key in policy:
        if key not in _POLICY:
            raise errors.InvalidConfig(
                f"{name!r}: unknown option {key!r}; known are {', '.join(sorted(_POLICY))}"
                f"{policies.hint(key)}"
            )
    named = {"retry_on", "discard_on"} & policy.keys()
    return {**policy, **{key: policies.error_names(policy[key]) for key in sorted(named)}}


@overload
def node(function: Callable[P, R], /) -> Node[P, R]: ...
@overload
def node(
    *,
    name: str | None = None,
    queue: Literal["cpu", "gpu"] | None = None,
    model: str | None = None,
    isolation: Literal["process"] | None = None,
    **policy: Unpack[Policy],
) -> Callable[[Callable[P, R]], Node[P, R]]: ...
def node(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    queue: Literal["cpu", "gpu"] | None = None,
    model: str | None = None,
    isolation: Literal["process"] | None = None,
    **policy: Any,
) -> Any:
    """Declare a function as a node; the function's name is the node's, unless `name` is given.

    `model` is what a gpu worker loads for it; it puts the node on the gpu queue. A returned dict is
    the node's outputs; anything else is its one output; None is no output. `isolation="process"`:
    each of its jobs has a fresh process, in a worker with slots.
    """

    def declare(function: Callable[..., Any]) -> Node[..., Any]:
        made = node_functions.NodeFunction(
            function, name or getattr(function, "__name__", repr(function))
        )
        made.isolation = isolation
        if queue not in (None, "cpu", "gpu"):
            raise errors.UnknownQueue(
                f"node {made.name!r}: unknown queue {queue!r}: a node runs on cpu or gpu"
            )
        if model is not None and queue == "cpu":
            raise errors.InvalidConfig(f"node {made.name!r}: a model needs queue='gpu'")
        entry: dict[str, Any] = {"gpu": True} if queue == "gpu" or model is not None else {}
        if model is not None:
            entry["model"] = model
        entry |= _policy(made.name, policy)
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
def workflow(function: Callable[P, object], /) -> Workflow[P]: ...
@overload
def workflow(*, name: str) -> Callable[[Callable[P, object]], Workflow[P]]: ...
def workflow(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Declare a function as a workflow: it is called once to build the graph, and computes nothing.

    Its parameters are the keys of a run's context. A node's call returns a placeholder for its
    outputs. Other nodes take it as an input, and then wait for the node.
    """

    def declare(function: Callable[..., Any]) -> Workflow[...]:
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
    `keys` what it needs; `answer` is the answer's type for checkers, and not verified.
    """
    del answer
    graph = building.needed("ask()")
    question: dict[str, Any] = {"widget": widget}
    if prompt is not None:
        question["prompt"] = prompt
    options = building.Options(id, _options(id, id, after, skip_if, {}).after, skip_if)
    return cast("T", graph.add_question({**question, **keys}, target, options))


def run_input(key: str, kind: type[T] = cast("type[Any]", object)) -> T:
    """Return the value under a key of the run's context that is not a parameter.

    A run may lack the key; a value that it has is checked against `kind`.
    """
    graph = building.needed("run_input()")
    graph.run_inputs[key] = Any if kind is object else kind
    return cast("T", graph.of_run(key))


def filtered(items: L, conditions: dict[str, Any]) -> L:
    """Return the matching members of a future list, as in refs: `{"kind:eq": "csv"}`."""
    return cast("L", handles.filtered(items, conditions))


def declared_in(module: str) -> list[Node[..., Any] | Workflow[...]]:
    """Return the nodes and workflows that a module's functions declared, by module name."""
    return [thing for (_, owner, _), thing in _declared.items() if owner == module]


def install(*things: Node[..., Any] | Workflow[...] | ModuleType) -> None:
    """Register nodes and workflows in this process; of a module, those that its names hold.

    Declaring does so already; this restores them after `config.reset_for_tests()`. Without
    arguments: all declared ones.
    """
    for thing in things or tuple(_declared.values()):
        held = list(vars(thing).values()) if isinstance(thing, ModuleType) else [thing]
        for each in held:
            if isinstance(each, (Node, Workflow)):
                cast("Node[..., Any] | Workflow[...]", each).install()
