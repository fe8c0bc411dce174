"""Call a task with what its signature takes: reason, args, a model of them, or keywords."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.dag import payload, typed_values

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TaskCaller:
    """How a task is called.

    It gets `reason`, `args`, both or neither by position, in this order unless only the first one
    is a parameter for the args: its name is `args`, or its annotation is a dict, a model or a
    dataclass. Then a second one that is not named `reason` keeps its default. A single other
    parameter gets the reason. Without one for the args, keyword-only ones and `**rest` take them.
    """

    def __init__(self, task: Callable[..., Any]) -> None:
        try:
            found = list(inspect.signature(task).parameters.values())
        except (TypeError, ValueError):
            found = [inspect.Parameter("reason", _NAMED[0])]  # a builtin without a signature
        scope = typed_values.scope_of(task)
        places = [p for p in found if p.kind in _NAMED]
        kinds = [typed_values.read(p.annotation, scope) for p in places[:2]]
        for_args = [_is_for_args(p, kind) for p, kind in zip(places, kinds, strict=False)]
        self.reason = self.args = len(places) > 1
        needed = self.args and places[1].default is places[1].empty
        self._args_first = for_args == [True, False] or (
            for_args == [True, True] and not needed and places[1].name != "args"
        )
        if any(p.kind is p.VAR_POSITIONAL for p in found):
            self.reason = self.args = True
        elif len(places) == 1:
            self.args = for_args[0]
            self.reason = not self.args
        elif self._args_first:
            self.reason = needed or places[1].name == "reason"
        self._record: Any = None
        if self.args and places:
            kind = kinds[0 if self._args_first or len(places) == 1 else 1]
            self._record = kind if any(map(typed_values.is_record, _members(kind))) else None
        named = [
            p.replace(annotation=_readable(p.annotation, scope))
            for p in found
            if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
        ]
        # Apps of 0.3.0 have tasks with args and `(reason, *, client=...)`, which drop the args.
        strict = not self.reason or any(p.default is p.empty for p in named)
        self._keywords = typed_values.Keywords([] if self.args else named, scope, strict=strict)
        self.checks = self._record is not None or bool(self._keywords)
        """Whether the task may refuse args."""
        self.drops_args = self.reason and not (self.args or self.checks)
        """Whether its one parameter gets the reason, so that nothing reads the args."""
        gets_reason = places[0].name if places and not self.args else "reason"
        self._misnamed = None if gets_reason == "reason" else gets_reason

    def call(self, task: Callable[..., Any], reason: str, args: Any, name: str) -> Any:
        """Call the task and return its value. Raises `ArgsRefused` with `name` in the message."""
        if self.checks:
            taken = self.checked(args, f"args of task {name!r}")
            if self._record is None:
                return task(reason, **taken) if self.reason else task(**taken)
            args = taken
        if self.args:
            if self.reason:
                return task(args, reason) if self._args_first else task(reason, args)
            return task(args)
        return task(reason) if self.reason else task()

    def refuse_lost(self, args: Mapping[str, Any], where: str, *, dropped: bool = False) -> None:
        """Raise `ArgsRefused` for an arg that the parameter of its name would not get.

        `dropped`: for any args, if the task reads none.
        """
        if self._misnamed in args or (dropped and self.drops_args):
            raise errors.ArgsRefused(
                f"{where}: parameter {self._misnamed or 'reason'!r} gets the job's reason; name it "
                "`args` or annotate it as a dict and it gets them, or make it keyword-only "
                "(`def task(*, day)`) and it gets the one of its name"
            )

    def checked(self, args: Any, where: str) -> Any:
        """Return the model or the keywords made of the args, for a caller that `checks`."""
        if self._record is None:
            return self._keywords.bound(args, where)
        return typed_values.taken(args, self._record, where)


def _is_for_args(parameter: inspect.Parameter, kind: Any) -> bool:
    if parameter.name in ("args", "reason"):
        return parameter.name == "args"
    return all(map(_is_dict, _members(kind)))


def _is_dict(kind: Any) -> bool:
    """Return whether values of an annotation are dicts or made of one, and never texts."""
    found = typing.get_origin(kind) or kind
    if typed_values.is_record(kind) or typing.is_typeddict(found):
        return True
    return isinstance(found, type) and issubclass(found, Mapping)


def _members(kind: Any) -> list[Any]:
    """Return the alternatives of a union but None, else the annotation alone."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(kind) if each is not type(None)]
    return [kind]


def _readable(annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Return an annotation; `Any` for one that only a type checker knows, as tasks may have."""
    kind = typed_values.read(annotation, scope)
    return Any if isinstance(kind, typed_values.Unread) else kind


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
    checks = takes is not None and takes.checks
    where = f"args of task {task_name!r}"
    found: Any = args
    if type(args) is not dict or checks:
        found = _plain(args, where)
    if takes is not None and checks:
        typed_values.check_as_stored(takes.checked, found, where)
    if takes is not None:
        takes.refuse_lost(found, where)
    return found


def refuse_dropped(task_name: str, args: Mapping[str, Any] | None) -> None:
    """Raise `ArgsRefused` for args of a task that reads none.

    `check_args` takes them, since apps of 0.3.0 may queue such jobs.
    """
    task = config.get_config().ingest_task_map.get(task_name)
    if args and task is not None:
        caller_of(task).refuse_lost(args, f"args of task {task_name!r}", dropped=True)


def _plain(args: Any, where: str) -> dict[str, Any]:
    if (dump := getattr(args, "model_dump", None)) is not None:
        args = dump(mode="json")
    elif typed_values.is_record(type(args)):
        args = payload.plain(args, where)
    if not isinstance(args, Mapping):
        raise errors.ArgsRefused(f"{where}: a dict, not {type(args).__name__}")
    return dict(cast("Mapping[str, Any]", args))
