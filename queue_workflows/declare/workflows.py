"""Define workflows that are declared as functions: compile them, check inputs, call them."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from queue_workflows import config, errors
from queue_workflows.dag import typed_values
from queue_workflows.declare import building, callables, compiling, handles, mapping, options

P = ParamSpec("P")
R = TypeVar("R")
_compiling = threading.RLock()
"""One for all workflows, since one is compiled while another is, which calls it."""


class Workflow(callables.Mapped[P, R]):
    """A function that calls nodes, pipelines and `ask`; its parameters are a run's inputs.

    A call in another workflow adds a child run.
    """

    _kind = "workflow "

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.name = name
        self._short_name = name.rpartition(".")[2]
        self.needs = compiling.needs_of(function, name)
        """The keys that a run's inputs must have."""
        self._inputs = compiling.inputs_of(function)
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
        made._options = options.of_call(self.name, id, after, skip_if, {})
        return made

    def _added(self, args: Any, kwargs: Any, *, waits: bool) -> handles.Handle:
        graph = compiling.needed(f"workflow {self.name!r} (outside, runs.submit() runs it)")
        given = self._bound(graph, args, kwargs)
        stores = not waits or self._built().has_output
        return graph.add_run(self.name, given, self._options, waits=waits, stores=stores)

    def _each(self, graph: building.Graph, also: dict[str, Any]) -> Callable[[Any], Any]:
        stores = self._built().has_output

        def build(item: object) -> Any:
            return mapping.run_each(
                graph, self.name, self._bound(graph, (item,), also), stores=stores
            )

        return build

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
        where = f"inputs of workflow {self.name!r}"
        typed_values.check_as_stored(self._check_stored, given, where)

    def _check_stored(self, given: Any, where: str) -> None:
        names = cast("dict[str, Any]", given).keys() if isinstance(given, dict) else ()
        optional = self._optional(names)
        if optional is not None:
            self._inputs.bound(given, where, optional)

    def _optional(self, names: Iterable[str]) -> Mapping[str, Any] | None:
        """Return what `run_input` names, if these are more than the parameters.

        Returns None if the graph cannot be built: the run fails with that reason when it starts.
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
            callables.refuse_second("workflow", self.name, owner.place, self.place)
        known[self.name] = self

    @property
    def place(self) -> tuple[str, str]:
        """Return module and qualified name of the function."""
        return self._function.__module__, self._function.__qualname__

    def _built(self) -> compiling.Compiled:
        with _compiling:
            if self._compiled is None:
                self._compiled = compiling.build(self._function, self.name)
            return self._compiled

    def __repr__(self) -> str:
        return f"<workflow {self.name!r}>"
