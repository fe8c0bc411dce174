"""Define the declared functions that a workflow calls: nodes, pipelines, other workflows."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
)

from queue_workflows import config, errors
from queue_workflows.dag import typed_values
from queue_workflows.declare import building, compiling, handles, node_functions
from queue_workflows.tasks import registry

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_compiling = threading.RLock()
"""One lock for all workflows, since a workflow that calls another one compiles it meanwhile."""


class NodeOptions(registry.Policy, total=False):
    """The options of `node`: its own, and the policy of its jobs."""

    name: str | None
    queue: Literal["cpu", "gpu"] | None
    model: str | None
    isolation: Literal["process"] | None
    version: int | None


def of_call(
    name: str,
    step_id: str | None,
    after: Iterable[object],
    skip_if: object,
    policy: Mapping[str, Any] = {},
    before: building.Options = building.Options(),
) -> building.Options:
    """Return the options of the next call of a declared function, in addition to those `before`."""
    if isinstance(after, (str, Mapping, handles.Handle)):
        raise errors.InvalidWorkflow(f"{name!r}: after=[...] takes a list of outputs")
    extra = registry.named_errors(policy, registry.Policy, repr(name))
    return building.Options(
        id=before.id if step_id is None else step_id,
        after=(*before.after, *after),
        skip_if=before.skip_if if skip_if is None else skip_if,
        extra={**before.extra, **extra},
    )


class Mapped(Generic[P, R]):
    """A declared function that can be called for each item of a future list."""

    name: str
    _kind = "node"
    _short_name: str
    _options: building.Options

    def __repr__(self) -> str:
        return f"<{self._kind} {self.name!r}>"

    def map(
        self: Mapped[Concatenate[T, ...], R],
        items: Iterable[T],
        *,
        key: str | None = None,
        at_once: int | None = None,
        may_fail: float = 0,
        also: Mapping[str, Any] | None = None,
    ) -> list[R]:
        """Add a call for each item of a future list; return the list of results, in its order.

        A call is a node, the nodes of a pipeline, or a run of a workflow. An item is the first
        argument, `also` has the others. `key`: the field that names an item; by default the item
        itself. `at_once`: how many are open at most. `may_fail`: how many items may fail, a count
        (int) or a share of all (float); their results are left out, see `failures`.
        """
        graph = compiling.needed(f"{self._kind} {self.name!r}.map()")
        settings = {"key": key, "at_once": at_once, "may_fail": may_fail or None}
        build, options = self._each(graph, dict(also or {})), self._options
        if isinstance(self, Node):
            options = options._replace(extra={})  # each item's node has the policy
        return cast("list[R]", graph.add_map(self._short_name, items, settings, build, options))

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        """Return a function that adds the call for one item."""
        raise NotImplementedError


class WithPolicy(Mapped[P, R]):
    """One whose calls add nodes to the run itself, which have a policy."""

    def options(
        self,
        id: str | None = None,  # noqa: A002  the definition's word
        *,
        after: Iterable[object] = (),
        skip_if: object = None,
        **policy: Unpack[registry.Policy],
    ) -> Self:
        """Return it with options for its next call: its step's or node's id, dependencies.

        `skip_if`: an output, or `output == x`, or `output != x`. The policy overrides the node's
        own. A pipeline's policy and `skip_if` apply to its nodes without their own. Options from
        earlier calls stay, unless they are given again.
        """
        made = copy.copy(self)
        made._options = of_call(self.name, id, after, skip_if, policy, self._options)
        return made


class Node(WithPolicy[P, R]):
    """A function as a node. A call in a workflow adds a node; elsewhere it runs the function."""

    def __init__(self, function: node_functions.NodeFunction, entry: Mapping[str, Any]) -> None:
        self.name = function.name
        """The node's name in rows and definitions."""
        self._function = function
        self._entry = entry
        self._options = building.Options()
        self.__doc__ = function.function.__doc__
        self.__name__ = self._short_name = function.function.__name__
        self.__module__ = function.function.__module__
        self.__wrapped__ = function.function

    @property
    def function(self) -> Callable[P, R]:
        """Return the function as it was written."""
        return self._function.function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graph = compiling.current.get()
        if graph is None:
            return self._function.function(*args, **kwargs)
        return cast("R", self._added(graph, self._options, args, kwargs))

    def _added(self, graph: building.Graph, options: building.Options, args: Any, kw: Any) -> Any:
        where = f"{graph.where}: {self._options.id or self.__name__!r}"
        bound = self._function.bind(where, args, kw)
        return graph.add_node(self._function, self._entry, bound, options)

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        inner = building.Options(extra=self._options.extra)
        return lambda item: self._added(graph, inner, (item,), also)

    def install(self) -> None:
        """Register it by its name here; raise `InvalidConfig` if another node has that name."""
        owner = config.get_config().node_map.get(self.name)
        if isinstance(owner, node_functions.NodeFunction):
            refuse_second("node", self.name, owner.place, self._function.place)
        own = self._function
        config.register_node(self.name, own, isolation=own.isolation, version=own.version)


class Pipeline(WithPolicy[P, R]):
    """A function that calls nodes. A call in a workflow adds a step with them.

    Mapped, it returns one output of one of its nodes: the item's result.
    """

    _kind = "pipeline"

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.name = self._short_name = name
        self._function = function
        self._options = building.Options()
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graph = compiling.needed(f"pipeline {self.name!r}")
        given = (list(args), dict(kwargs))
        return graph.add_group(
            self.name, lambda: self._function(*args, **kwargs), given, self._options
        )

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        del graph
        function = cast("Callable[..., Any]", self._function)
        return lambda item: function(item, **also)


class Workflow(Mapped[P, R]):
    """A function that calls nodes, pipelines and `ask`; its parameters are a run's inputs.

    A call in another workflow adds a child run.
    """

    _kind = "workflow"

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.name = name
        self._short_name = name.rpartition(".")[2]
        self.needs = compiling.needs_of(function, name)
        """The keys that a run's inputs must have."""
        parameters = [*inspect.signature(function).parameters.values()]
        self._inputs = typed_values.Keywords(parameters, typed_values.scope_of(function))
        self._function = function
        self._compiled: compiling.Compiled | None = None
        self._options = building.Options()
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Add a node that waits for a run of this workflow, and has its output."""
        return cast("R", self._added(args, kwargs, waits=True))

    def start(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Add a node that makes a run of this workflow and does not wait; return the run's id."""
        return cast("str", self._added(args, kwargs, waits=False))

    def options(
        self,
        id: str | None = None,  # noqa: A002  the definition's word
        *,
        after: Iterable[object] = (),
        skip_if: object = None,
    ) -> Workflow[P, R]:
        """Return the workflow with options for its next call in another workflow."""
        made = copy.copy(self)
        made._options = of_call(self.name, id, after, skip_if, before=self._options)
        return made

    def _added(self, args: Any, kwargs: Any, *, waits: bool) -> handles.Handle:
        graph = compiling.needed(f"workflow {self.name!r} (outside, runs.submit() runs it)")
        if graph.group is not None:
            what = f"workflow {self.name!r} is called"
            raise building.refused(graph.where, graph.group, what)
        given = self._bound(graph, args, kwargs)
        stores = not waits or self._built().has_output
        return graph.add_run(self.name, given, self._options, waits=waits, stores=stores)

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        stores = self._built().has_output
        options = building.Options()
        return lambda item: graph.add_run(
            self.name, self._bound(graph, (item,), also), options, waits=True, stores=stores
        )

    def _bound(self, graph: building.Graph, args: Any, kwargs: Any) -> dict[str, Any]:
        try:
            return dict(inspect.signature(self._function).bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise errors.InvalidWorkflow(f"{graph.where}: {self.name!r}: {error}") from None

    def document(self) -> dict[str, Any]:
        """Return the workflow in JSON: `{"name", "steps"}`. Raises `InvalidWorkflow`."""
        return self._built().document

    def pipelines(self) -> dict[str, dict[str, Any]]:
        """Return its pipelines by name, each `{"name", "nodes"}`. Raises `InvalidWorkflow`."""
        return self._built().pipelines

    def inputs(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Return the inputs of a run with these arguments, for `runs.submit(inputs=...)`."""
        bound = inspect.signature(self._function).bind(*args, **kwargs)
        return handles.constant(dict(bound.arguments), f"workflow {self.name!r}")

    def check_inputs(self, given: Any) -> None:
        """Raise `ArgsRefused` unless a run of the workflow can have these inputs.

        The error names missing and unknown keys (with the closest known key) and wrong types.
        Values may be Python values or what JSON makes of them.
        """

        def check(given: Any, where: str) -> None:
            names = cast("dict[str, Any]", given).keys() if isinstance(given, dict) else ()
            if (optional := self._optional(names)) is not None:
                self._inputs.bound(given, where, optional)

        typed_values.check_as_stored(check, given, f"inputs of workflow {self.name!r}")

    def _optional(self, names: Iterable[str]) -> Mapping[str, Any] | None:
        """Return the names in `run_input`, if they are more than the parameters.

        Returns None if the graph cannot be built; its run then fails with the reason at its start.
        """
        if set(names) <= set(self.needs):
            return {}
        try:
            return self._built().run_inputs
        except errors.InvalidWorkflow:
            return None

    def accepts_input(self, key: str, value: Any) -> bool:
        """Return whether the value fits the parameter of this name; True if there is none."""
        return self._inputs.accepts(key, value, self._optional([key]) or {})

    def install(self) -> None:
        """Add it to this process's provider; `InvalidConfig` if another one has that name."""
        known = config.get_config().workflow_map
        owner = known.get(self.name)
        if isinstance(owner, Workflow):
            refuse_second("workflow", self.name, owner.place, self.place)
        known[self.name] = self

    @property
    def place(self) -> tuple[str, str]:
        """Return module and qualified name of the function."""
        return self._function.__module__, self._function.__qualname__

    def _built(self) -> compiling.Compiled:
        with _compiling:
            if self._compiled is None:
                self._compiled = compiling.build(self._function, self.name, self.needs)
            return self._compiled


def takes_one(function: Callable[..., Any]) -> bool:
    """Return whether a function that builds a part of the graph is to be given a value.

    A default of a function that is not a node is its own value, as in `lambda k=k: say(k)`.
    """
    declared = isinstance(function, Mapped)
    return any(
        name not in node_functions.OFFERS
        and each.kind is not each.VAR_KEYWORD
        and (declared or each.default is each.empty)
        for name, each in inspect.signature(function).parameters.items()
    )


def refuse_second(kind: str, name: str, owner: tuple[str, str], place: tuple[str, str]) -> None:
    """Raise `InvalidConfig` if two functions have one name."""
    if owner != place:
        raise errors.InvalidConfig(
            f"two {kind}s are named {name!r}: {'.'.join(owner)} and {'.'.join(place)}; "
            f"give one another by @{kind}(name=...)"
        )
