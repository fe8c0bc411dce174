"""Register ingest tasks by name, and call them with what their signatures take."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, overload

from queue_workflows import config, errors
from queue_workflows.dag import payload, typed_values
from queue_workflows.dag import policy as policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class Backoff(TypedDict, total=False):
    """The growth of the wait before another attempt; `jitter` is its random share."""

    kind: Literal["constant", "linear", "exponential"]
    base_s: float
    cap_s: float
    jitter: float


class JobPolicy(TypedDict, total=False):
    """The policy of the jobs of a node or a task; each key is stored as it is given.

    `retry_on`, `discard_on`: errors by class or name; a class is stored by its name.
    """

    retries: int
    timeout_s: float
    retry_on: str | type[BaseException] | Iterable[str | type[BaseException]]
    discard_on: str | type[BaseException] | Iterable[str | type[BaseException]]
    priority: int
    lock_key: str


class Policy(JobPolicy, total=False):
    """The policy of a node's jobs."""

    backoff: float | Backoff


class TaskPolicy(JobPolicy, total=False):
    """Defaults for the jobs of a task; a job's row overrides them.

    `max_attempts` is `retries` + 1. `queue` takes jobs whose enqueuer names no queue.
    `isolation="process"`: each job has a fresh process, in a worker with slots.
    """

    backoff: float | Mapping[str, Any]
    queue: str
    max_attempts: int
    isolation: str | None


@overload
def register_ingest_task(name: str, callable_: F, **policy: Unpack[TaskPolicy]) -> F: ...
@overload
def register_ingest_task(name: str, **policy: Unpack[TaskPolicy]) -> Callable[[F], F]: ...
def register_ingest_task(
    name: str, callable_: Callable[..., Any] | None = None, **policy: Unpack[TaskPolicy]
) -> Any:
    """Register `callable_` as the task for ingest jobs with this name, or return a decorator.

    A task is a function, generator, async function or async generator. It takes `reason`, `args`,
    both or neither, or keywords of its own. Raises `InvalidConfig` (a ValueError) with the fault.
    """
    where = f"ingest task {name!r}"
    options: dict[str, Any] = {
        "policy": _checked(policy, where),
        "queue": _queue(policy.get("queue"), where),
        "isolation": policy.get("isolation"),
    }

    def register(task: F) -> F:
        config.register_ingest_task(name, task, **options)
        if callable_ is None:
            _decorated[name] = task, options
        return task

    return register if callable_ is None else register(callable_)


_decorated: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
"""What modules registered on import, which happens once per process."""


def register_decorated() -> None:
    """Register decorated tasks again after the configuration was reset; for tests."""
    for name, (task, options) in _decorated.items():
        if getattr(task, "__module__", None) in sys.modules:
            config.register_ingest_task(name, task, **options)


def named_errors(options: Mapping[str, Any], kind: Any, where: str) -> dict[str, Any]:
    """Return options, errors by their names. Raises `InvalidConfig` for one that `kind` lacks."""
    known = sorted(kind.__annotations__)
    for key in options:
        if key not in known:
            raise errors.InvalidConfig(
                f"{where}: unknown option {key!r}; known are {', '.join(known)}"
                f"{policies.hint(key, known)}"
            )
    listed = {key: options.get(key) for key in ("retry_on", "discard_on")}
    return {
        **options,
        **{key: policies.error_names(each) for key, each in listed.items() if each is not None},
    }


def _checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    options = named_errors(options, TaskPolicy, where)
    entry = {key: value for key, value in options.items() if key in policies.KEYS}
    if (most := options.get("max_attempts")) is not None:
        if entry.get("retries") is not None:
            raise errors.InvalidConfig(f"{where}: max_attempts is retries + 1: give one of them")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise errors.InvalidConfig(f"{where}: max_attempts must be 1 or more, not {most!r:.40}")
        entry["retries"] = most - 1
    try:
        return policies.read(entry, {}, where) or {}
    except errors.InvalidWorkflow as error:
        raise errors.InvalidConfig(str(error)) from None


def _queue(queue: Any, where: str) -> str | None:
    if queue is None:
        return None
    if (fault := config.queue_name_fault(queue)) is not None:
        raise errors.InvalidConfig(f"{where}: {fault}")
    if queue in config.DAG_QUEUES:
        raise errors.InvalidConfig(f"{where}: queue {queue} belongs to workflow nodes")
    return queue


def row_defaults(task_name: str) -> dict[str, Any]:
    """Return the columns that a new job takes from its task, of `queue`, `priority`, `lock_key`.

    The worker reads the rest of the policy when it counts attempts, so that a row of a plain SQL
    INSERT works too.
    """
    cfg = config.get_config()
    task = cfg.ingest_task_policies.get(task_name, {})
    found = {key: task[key] for key in ("priority", "lock_key") if key in task}
    if (queue := cfg.ingest_task_queues.get(task_name)) is not None:
        found["queue"] = queue
    return found


# --- Calls.

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
        named: list[inspect.Parameter] = []
        for p in found:
            if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
                kind = typed_values.read(p.annotation, scope)
                is_unread = isinstance(kind, typed_values.Unread)  # a type checker may know it
                named.append(p.replace(annotation=Any if is_unread else kind))
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
                "`args` or annotate it as a dict to get all args, or make it keyword-only "
                "(`def task(*, day)`) to get the arg of its name"
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
    """Return whether all values of an annotation are dicts, or objects that are made of a dict."""
    found = typing.get_origin(kind) or kind
    if typed_values.is_record(kind) or typing.is_typeddict(found):
        return True
    return isinstance(found, type) and issubclass(found, Mapping)


def _members(kind: Any) -> list[Any]:
    """Return the members of a union except None; for another annotation, a list with it."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(kind) if each is not type(None)]
    return [kind]


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
