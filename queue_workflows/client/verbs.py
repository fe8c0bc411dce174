"""Turn the functions of `calls` into methods of the two clients, with the same types."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from queue_workflows.client import calls, events, request_loops, transport
from queue_workflows.types import JsonDict

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound=Mapping[str, Any])


class _SyncCaller(Protocol):
    def call(self, call: transport.Call[T]) -> T: ...

    def stream(self, follow: events.Follower) -> Iterator[events.Event]: ...


class _AsyncCaller(Protocol):
    async def call(self, call: transport.Call[T]) -> T: ...

    def stream(self, follow: events.Follower) -> AsyncIterator[events.Event]: ...


class SyncGroup:
    """Verbs that a `Client` calls."""

    def __init__(self, client: _SyncCaller) -> None:
        self._client = client

    def call(self, call: transport.Call[T]) -> T:
        """Return what a request returns."""
        return self._client.call(call)

    def all(
        self, limit: int, page: Callable[[int, str | None], transport.Call[calls.Page]]
    ) -> list[JsonDict]:
        """Return up to `limit` items of a list; `page`: the call of its size and cursor."""
        pages = request_loops.Pages(limit, page)
        while (request := pages.next()) is not None:
            pages.add(self.call(request))
        return pages.items

    def end_of(self, wait: request_loops.Wait[W]) -> W:
        """Return a run or job once it has ended. Raises `WaitTimeout`."""
        while not wait.is_over(found := self.call(wait.next())):
            pass
        return found

    def parts_of(
        self, where: tuple[str, ...], name: str | None, after: str | None
    ) -> list[events.Part]:
        """Return what is stored of a stream; `where`: the path of its job or node."""
        page = functools.partial(calls.parts, path_of=where, name=name)
        found = self.all(sys.maxsize, lambda limit, cursor: page(limit, cursor or after))
        return [events.part_of(each) for each in found]

    def parts_from(
        self, where: tuple[str, ...], name: str | None, after: str | None
    ) -> Iterator[events.Part]:
        """Yield what comes of a stream until its job has ended."""
        for event in self._client.stream(calls.stream(where, name, after)):
            yield events.part_of(event.data)


class AsyncGroup:
    """Verbs that an `AsyncClient` calls."""

    def __init__(self, client: _AsyncCaller) -> None:
        self._client = client

    async def call(self, call: transport.Call[T]) -> T:
        """Return what a request returns."""
        return await self._client.call(call)

    async def all(
        self, limit: int, page: Callable[[int, str | None], transport.Call[calls.Page]]
    ) -> list[JsonDict]:
        """Return up to `limit` items of a list; `page`: the call of its size and cursor."""
        pages = request_loops.Pages(limit, page)
        while (request := pages.next()) is not None:
            pages.add(await self.call(request))
        return pages.items

    async def end_of(self, wait: request_loops.Wait[W]) -> W:
        """Return a run or job once it has ended. Raises `WaitTimeout`."""
        while not wait.is_over(found := await self.call(wait.next())):
            pass
        return found

    async def parts_of(
        self, where: tuple[str, ...], name: str | None, after: str | None
    ) -> list[events.Part]:
        """Return what is stored of a stream; `where`: the path of its job or node."""
        page = functools.partial(calls.parts, path_of=where, name=name)
        found = await self.all(sys.maxsize, lambda limit, cursor: page(limit, cursor or after))
        return [events.part_of(each) for each in found]

    async def parts_from(
        self, where: tuple[str, ...], name: str | None, after: str | None
    ) -> AsyncIterator[events.Part]:
        """Yield what comes of a stream until its job has ended."""
        async for event in self._client.stream(calls.stream(where, name, after)):
            yield events.part_of(event.data)


class Sync(Generic[P, T]):
    """A method that takes what a verb takes, and returns what its request returns."""

    def __init__(self, verb: Callable[P, transport.Call[T]]) -> None:
        self._verb = verb
        self.__doc__ = verb.__doc__

    def __get__(self, caller: _SyncCaller | None, kind: Any = None) -> Callable[P, T]:
        @functools.wraps(self._verb)
        def method(*args: P.args, **kwargs: P.kwargs) -> T:
            assert caller is not None, "a verb is called on a client"
            return caller.call(self._verb(*args, **kwargs))

        return method


class Async(Generic[P, T]):
    """A method that takes what a verb takes; awaited, it returns what its request returns."""

    def __init__(self, verb: Callable[P, transport.Call[T]]) -> None:
        self._verb = verb
        self.__doc__ = verb.__doc__

    def __get__(
        self, caller: _AsyncCaller | None, kind: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(self._verb)
        async def method(*args: P.args, **kwargs: P.kwargs) -> T:
            assert caller is not None, "a verb is called on a client"
            return await caller.call(self._verb(*args, **kwargs))

        return method
