"""Register ingest tasks by name, with the policy of their jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, overload

from queue_workflows import config, errors
from queue_workflows.dag import policy as policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class TaskPolicy(TypedDict, total=False):
    """Defaults for the jobs of a task, as in a node's policy; a job's row overrides them.

    `max_attempts` is `retries` + 1. `queue` takes jobs whose enqueuer names no queue. `retry_on`
    and `discard_on` name errors by class or name. `isolation="process"`: each job has a fresh
    process, in a worker with slots.
    """

    queue: str
    retries: int
    max_attempts: int
    backoff: float | Mapping[str, Any]
    timeout_s: float
    retry_on: str | type[BaseException] | Iterable[str | type[BaseException]]
    discard_on: str | type[BaseException] | Iterable[str | type[BaseException]]
    priority: int
    lock_key: str
    isolation: str | None


_OPTIONS = frozenset(TaskPolicy.__annotations__)


@overload
def register_ingest_task(name: str, callable_: F, **policy: Unpack[TaskPolicy]) -> F: ...
@overload
def register_ingest_task(name: str, **policy: Unpack[TaskPolicy]) -> Callable[[F], F]: ...
def register_ingest_task(
    name: str, callable_: Callable[..., Any] | None = None, **policy: Unpack[TaskPolicy]
) -> Any:
    """Register `callable_` as the task for ingest jobs with this `task_name`; None: a decorator.

    A task is a function, generator, async function or async generator. It takes `reason`, `args`,
    both or neither, or keywords of its own. Raises `InvalidConfig` (a ValueError) with the fault.
    """
    where = f"ingest task {name!r}"
    found, queue = _checked(policy, where), _queue(policy.get("queue"), where)
    isolation = policy.get("isolation")

    def register(task: F) -> F:
        config.register_ingest_task(name, task, policy=found, queue=queue, isolation=isolation)
        if callable_ is None:
            _decorated[name] = _Decorated(task, found, queue, isolation)
        return task

    return register if callable_ is None else register(callable_)


class _Decorated(NamedTuple):
    task: Callable[..., Any]
    policy: dict[str, Any]
    queue: str | None
    isolation: str | None


_decorated: dict[str, _Decorated] = {}
"""What modules registered on import, which happens once per process."""


def register_decorated() -> None:
    """Register decorated tasks again after the configuration was reset; for tests."""
    for name, (task, found, queue, isolation) in _decorated.items():
        if getattr(task, "__module__", None) in sys.modules:
            config.register_ingest_task(name, task, policy=found, queue=queue, isolation=isolation)


def _checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in options:
        if key not in _OPTIONS:
            raise errors.InvalidConfig(
                f"{where}: unknown option {key!r}; known are {', '.join(sorted(_OPTIONS))}"
                f"{policies.hint(key, _OPTIONS)}"
            )
    entry = {key: value for key, value in options.items() if key in policies.KEYS}
    if (most := options.get("max_attempts")) is not None:
        if entry.get("retries") is not None:
            raise errors.InvalidConfig(f"{where}: max_attempts is retries + 1: give one of them")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise errors.InvalidConfig(f"{where}: max_attempts must be 1 or more, not {most!r:.40}")
        entry["retries"] = most - 1
    for key in ("retry_on", "discard_on"):
        if entry.get(key) is not None:
            entry[key] = policies.error_names(entry[key])
    try:
        return policies.read(entry, {}, where) or {}
    except errors.InvalidWorkflow as error:
        raise errors.InvalidConfig(str(error)) from None


def _queue(queue: Any, where: str) -> str | None:
    if queue is None:
        return None
    if not isinstance(queue, str) or not config.QUEUE_NAME.fullmatch(queue):
        raise errors.InvalidConfig(f"{where}: {queue!r:.80} is not a queue name")
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
