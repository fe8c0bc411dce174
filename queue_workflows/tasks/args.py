"""Call a task with what its signature takes: reason, args, a model of them, or keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.dag import arguments, jsonable, typed_values

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TaskCaller:
    """How a task is called.

    It gets `reason`, `args`, both or neither by position. A single parameter is the args if its
    name is `args` or its annotation is a model or dataclass, else the reason. If no parameter takes
    the args, the keyword-only parameters take them by name, and `**rest` takes the others.
    """

    def __init__(self, task: Callable[..., Any]) -> None:
        try:
            found = list(inspect.signature(task).parameters.values())
        except (TypeError, ValueError):
            found = [inspect.Parameter("reason", _NAMED[0])]  # a builtin without a signature
        scope = arguments.scope_of(task)
        places = [p for p in found if p.kind in _NAMED]
        self.reason = self.args = len(places) > 1
        self._record: Any = None
        if any(p.kind is p.VAR_POSITIONAL for p in found):
            self.reason = self.args = True
        elif len(places) == 1:
            sole = typed_values.read(places[0].annotation, scope)
            self.args = places[0].name == "args" or typed_values.is_record(sole)
            self.reason = not self.args
        if self.args and places:
            kind = typed_values.read(places[1 if len(places) > 1 else 0].annotation, scope)
            self._record = kind if typed_values.is_record(kind) else None
        named = [p for p in found if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        # Apps of 0.3.0 have tasks with args and `(reason, *, client=...)`, which drop the args.
        strict = not self.reason or any(p.default is p.empty for p in named)
        self._keywords = typed_values.Keywords([] if self.args else named, scope, strict=strict)
        self.checks = self._record is not None or bool(self._keywords)
        """Whether the task may refuse args."""
        self.drops_args = self.reason and not (self.args or self.checks)
        """Whether its one parameter gets the reason, so that nothing reads the args."""

    def call(self, task: Callable[..., Any], reason: str, args: Any, name: str) -> Any:
        """Call the task and return its value. Raises `ArgsRefused` with `name` in the message."""
        if self.checks:
            taken = self.checked(args, f"args of task {name!r}")
            if self._record is None:
                return task(reason, **taken) if self.reason else task(**taken)
            args = taken
        if self.args:
            return task(reason, args) if self.reason else task(args)
        return task(reason) if self.reason else task()

    def checked(self, args: Any, where: str) -> Any:
        """Return the model or the keywords made of the args, for a caller that `checks`."""
        if self._record is None:
            return self._keywords.bound(args, where)
        return typed_values.taken(args, self._record, where)


def caller_of(task: Callable[..., Any]) -> TaskCaller:
    """Return the caller of a task, cached if the task is hashable."""
    try:
        return _cached(task)
    except TypeError:
        return TaskCaller(task)


_cached = functools.lru_cache(maxsize=512)(TaskCaller)


def check_args(task_name: str, args: Any) -> dict[str, Any]:
    """Return the args as a new job of this task stores them.

    A dict stays as it is. A pydantic model or a dataclass becomes its JSON dict. Raises
    `ArgsRefused` (a ValueError) for args that do not fit the task's signature. A task that is not
    registered here accepts all args.
    """
    task = config.get_config().ingest_task_map.get(task_name)
    takes = None if task is None else caller_of(task)
    found: Any = args
    if type(args) is dict and (takes is None or not takes.checks):
        return found
    where = f"args of task {task_name!r}"
    if (dump := getattr(found, "model_dump", None)) is not None:
        found = dump(mode="json")
    elif typed_values.is_record(type(found)):
        found = jsonable.plain(found, where)
    if not isinstance(found, Mapping):
        raise errors.ArgsRefused(f"{where}: a dict, not {type(found).__name__}")
    found = dict(cast("Mapping[str, Any]", found))
    if takes is not None and takes.checks:
        typed_values.check_as_stored(takes.checked, found, where)
    return found
