"""Make the methods of both clients from the requests of `requests.catalog`, with the same types."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from queue_workflows.requests import catalog, request

P = ParamSpec("P")
T = TypeVar("T")


class Sync(Protocol):
    """A client that waits for each reply."""

    def send(self, asked: request.Request[T]) -> T: ...

    def stream(self, asked: catalog.Stream[T]) -> Iterator[T]: ...


class Async(Protocol):
    """A client of an event loop."""

    async def send(self, asked: request.Request[T]) -> T: ...

    def stream(self, asked: catalog.Stream[T]) -> AsyncIterator[T]: ...


C = TypeVar("C", Sync, Async, covariant=True)


class Group(Generic[C]):
    """Verbs of a client, for one noun."""

    def __init__(self, client: C) -> None:
        self.client = client


def _method(kind: Callable[P, Any], send: Callable[[Any], Any] | None) -> Any:
    """Return a function that takes the fields of a request, and sends it."""

    def method(*args: Any, **kwargs: Any) -> Any:
        assert send is not None, "a verb is called on a client"
        return send(kind(*args, **kwargs))

    method.__doc__ = kind.__doc__
    method.__signature__ = _signature(kind)  # pyright: ignore[reportFunctionMemberAccess]
    return method


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    """Return the fields of a request as parameters, with the plain types."""
    found, types = inspect.signature(kind), typing.get_type_hints(kind)
    named = [each.replace(annotation=types[each.name]) for each in found.parameters.values()]
    return found.replace(parameters=named, return_annotation=inspect.Signature.empty)


class Verb(Generic[P, T]):
    """A method that sends a request, and returns its result."""

    def __init__(self, kind: Callable[P, request.Request[T]]) -> None:
        self.kind = kind
        self.__doc__ = kind.__doc__

    @overload
    def __get__(self, group: Group[Sync], kind: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(
        self, group: Group[Async], kind: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, group: None, kind: Any = None) -> Callable[P, Any]: ...
    def __get__(self, group: Group[Any] | None, kind: Any = None) -> Any:
        return _method(self.kind, None if group is None else group.client.send)


class Stream(Generic[P, T]):
    """A method that opens a stream, and yields its items."""

    def __init__(self, kind: Callable[P, catalog.Stream[T]]) -> None:
        self.kind = kind
        self.__doc__ = kind.__doc__

    @overload
    def __get__(self, group: Group[Sync], kind: Any = None) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, group: Group[Async], kind: Any = None) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self, group: None, kind: Any = None) -> Callable[P, Any]: ...
    def __get__(self, group: Group[Any] | None, kind: Any = None) -> Any:
        return _method(self.kind, None if group is None else group.client.stream)


class Jobs(Group[C]):
    """Jobs outside of runs."""

    enqueue = Verb(catalog.Enqueue)
    get = Verb(catalog.GetJob)
    status = Verb(catalog.GetJobStatus)
    wait = Verb(catalog.WaitForJob)
    cancel = Verb(catalog.CancelJob)
    retry = Verb(catalog.RetryJob)
    cancel_many = Verb(catalog.CancelJobs)
    retry_many = Verb(catalog.RetryJobs)
    list = Verb(catalog.ListJobs)
    events = Verb(catalog.GetJobEvents)
    explain = Verb(catalog.ExplainJob)
    parts = Verb(catalog.GetJobParts)
    follow = Stream(catalog.FollowJob)


class Runs(Group[C]):
    """Runs of workflows."""

    submit = Verb(catalog.Submit)
    get = Verb(catalog.GetRun)
    wait = Verb(catalog.WaitForRun)
    cancel = Verb(catalog.CancelRun)
    retry = Verb(catalog.RetryRun)
    cancel_many = Verb(catalog.CancelRuns)
    retry_many = Verb(catalog.RetryRuns)
    answer = Verb(catalog.AnswerNode)
    list = Verb(catalog.ListRuns)
    nodes = Verb(catalog.ListNodes)
    explain = Verb(catalog.ExplainRun)
    parts = Verb(catalog.GetNodeParts)
    follow = Stream(catalog.FollowNode)


class Workers(Group[C]):
    """Worker processes, and the switches of machines and queues."""

    list = Verb(catalog.ListWorkers)
    enable = Verb(catalog.EnableWorkers)
    disable = Verb(catalog.DisableWorkers)
    drain = Verb(catalog.DrainWorkers)


class Queues(Group[C]):
    """Queues with their depth, limits and pauses."""

    list = Verb(catalog.ListQueues)
    get = Verb(catalog.GetQueue)
    pause = Verb(catalog.PauseQueue)
    resume = Verb(catalog.ResumeQueue)
    limit = Verb(catalog.LimitQueue)


class Acts(Group[C]):
    """Who did what."""

    list = Verb(catalog.ListActs)


class Schedules(Group[C]):
    """Schedules, of the code and of the database."""

    list = Verb(catalog.ListSchedules)
    preview = Verb(catalog.PreviewSchedule)
    pause = Verb(catalog.PauseSchedule)
    resume = Verb(catalog.ResumeSchedule)
    run_now = Verb(catalog.RunSchedule)
