"""Define the declared functions that a workflow calls, once or per item: nodes and pipelines."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
)

from queue_workflows import config, errors
from queue_workflows.declare import building, compiling, mapping, node_functions, options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Mapped(Generic[P, R]):
    """A declared function that can be called for each item of a future list."""

    name: str
    _kind = ""
    _short_name: str
    _options: building.Options

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
        argument, `also` has the others. `key`: the field that names an item; None: the item itself.
        `at_once`: how many are open at most. `may_fail`: how many items may fail, a count (int) or
        a share of all (float); their results are left out, see `failures`.
        """
        graph = compiling.needed(f"{self._kind}{self.name!r}.map()")
        settings = {"key": key, "at_once": at_once, "may_fail": may_fail or None}
        build = self._each(graph, dict(also or {}))
        found = mapping.add_map(graph, self._short_name, items, settings, build, self._outer())
        return cast("list[R]", found)

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        """Return what adds the call for one item."""
        raise NotImplementedError

    def _outer(self) -> building.Options:
        """Return the options of the map itself."""
        return self._options


class WithPolicy(Mapped[P, R]):
    """One whose calls add nodes to the run itself, which have a policy."""

    def options(
        self,
        id: str | None = None,  # noqa: A002  the definition's word
        *,
        after: Iterable[object] = (),
        skip_if: object = None,
        **policy: Unpack[options.Policy],
    ) -> Self:
        """Return it with options for its next call: its step's or node's id, dependencies.

        `skip_if`: an output, or `output == x`, or `output != x`. The policy overrides the node's
        own. That of a pipeline, and its `skip_if`, count for its nodes that have none.
        """
        made = copy.copy(self)
        made._options = options.of_call(self.name, id, after, skip_if, policy)
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
        graph = compiling.current()
        if graph is None:
            return self._function.function(*args, **kwargs)
        where = f"{graph.where}: {self._options.id or self.__name__!r}"
        given = self._function.bind(where, args, dict(kwargs))
        return cast("R", graph.add_node(self._function, self._entry, given, self._options))

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        where = f"{graph.where}: {self._options.id or self.__name__!r}"
        inner = building.Options(extra=self._options.extra)

        def build(item: object) -> Any:
            given = self._function.bind(where, (item,), also)
            return graph.add_node(self._function, self._entry, given, inner)

        return build

    def _outer(self) -> building.Options:
        return self._options._replace(extra={})  # each item's node has the policy

    def install(self) -> None:
        """Register it by its name here; raise `InvalidConfig` if another node has that name."""
        owner = config.get_config().node_map.get(self.name)
        if isinstance(owner, node_functions.NodeFunction):
            refuse_second("node", self.name, owner.place, self._function.place)
        own = self._function
        config.register_node(self.name, own, isolation=own.isolation, version=own.version)

    def __repr__(self) -> str:
        return f"<node {self.name!r}>"


class Pipeline(WithPolicy[P, R]):
    """A function that calls nodes. A call in a workflow adds a step with them.

    Mapped, it returns one output of one of its nodes: the item's result.
    """

    _kind = "pipeline "

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

    def __repr__(self) -> str:
        return f"<pipeline {self.name!r}>"


def takes_one(function: Callable[..., Any]) -> bool:
    """Return whether a function that builds a part of the graph is to be given a value.

    A default of a function that is no node is its own value, as in `lambda k=k: say(k)`.
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
