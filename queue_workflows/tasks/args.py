"""What a task takes of its job: reason, args, a model of them, or keywords; by its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.dag import arguments
from queue_workflows.tasks import annotated

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Taker:
    """How a task is called.

    Positionally with `reason`, `args`, both or neither: a sole parameter is the args if it is named
    so or annotated with a model or dataclass, else the reason. Without a place for the args, its
    keyword-only parameters take them by name, and `**rest` what they leave.
    """

    def __init__(self, task: Callable[..., Any]) -> None:
        try:
            found = list(inspect.signature(task).parameters.values())
        except (TypeError, ValueError):
            found = [inspect.Parameter("reason", _NAMED[0])]  # a builtin that does not tell
        scope = arguments.scope_of(task)
        places = [p for p in found if p.kind in _NAMED]
        self.reason = self.args = len(places) > 1
        self._record: Any = None
        if any(p.kind is p.VAR_POSITIONAL for p in found):
            self.reason = self.args = True
        elif len(places) == 1:
            sole = annotated.read(places[0].annotation, scope)
            self.args = places[0].name == "args" or annotated.is_record(sole)
            self.reason = not self.args
        if self.args and places:
            kind = annotated.read(places[1 if len(places) > 1 else 0].annotation, scope)
            self._record = kind if annotated.is_record(kind) else None
        named = [p for p in found if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        # Hosts of 0.3.0 have tasks with args and `(reason, *, client=...)`, which drop the args.
        strict = not self.reason or any(p.default is p.empty for p in named)
        self._keywords = annotated.Keywords([] if self.args else named, scope, strict=strict)

    def bound(
        self, reason: str, args: Mapping[str, Any], where: str
    ) -> tuple[list[Any], dict[str, Any]]:
        """What the task is called with. Raises `ArgsRefused` that starts with `where`."""
        placed: list[Any] = [reason] if self.reason else []
        if self.args:
            given = args if self._record is None else annotated.taken(args, self._record, where)
            return [*placed, given], {}
        return placed, self._keywords.bound(args, where) if self._keywords else {}


def taker(task: Callable[..., Any]) -> Taker:
    """The taker of a task, remembered where the task can be hashed."""
    try:
        return _cached(task)
    except TypeError:
        return Taker(task)


_cached = functools.lru_cache(maxsize=512)(Taker)


def check_args(task_name: str, args: Any) -> dict[str, Any]:
    """The args as a new job of this task stores them: a dict as it is, a model as its JSON dict.

    Raises `ArgsRefused` (a ValueError) for args that the task does not take, as far as its
    signature tells; a task that is not registered here takes all.
    """
    where = f"args of task {task_name!r}"
    if (dump := getattr(args, "model_dump", None)) is not None:
        args = dump(mode="json")
    if not isinstance(args, Mapping):
        raise errors.ArgsRefused(f"{where}: a dict, not {type(args).__name__}")
    found = dict(cast("Mapping[str, Any]", args))
    task = config.get_config().ingest_task_map.get(task_name)
    if task is not None:
        taker(task).bound("", found, where)
    return found
