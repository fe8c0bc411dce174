"""Requests that both clients send one after the other: the pages of a list, the polls of a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from queue_workflows import errors
from queue_workflows.client import calls, job_states, transport
from queue_workflows.types import JsonDict

T = TypeVar("T", bound=Mapping[str, Any])


class Pages:
    """Up to `limit` items of a list; `page`: the call of its size and cursor."""

    def __init__(
        self, limit: int, page: Callable[[int, str | None], transport.Call[calls.Page]]
    ) -> None:
        self._limit = limit
        self._page = page
        self._last: calls.Page | None = None
        self.items: list[JsonDict] = []

    def next(self) -> transport.Call[calls.Page] | None:
        """Return the next request; None if the items are complete."""
        cursor = None if self._last is None else self._last.cursor
        left = self._limit - len(self.items)
        if left <= 0 or (self._last is not None and cursor is None):
            return None
        return self._page(min(left, calls.PAGE), cursor)

    def add(self, page: calls.Page) -> None:
        """Add the items that a request has returned."""
        self._last = page
        self.items += page.items


class Wait(Generic[T]):
    """A wait for the end of a run or job, in requests that the service answers in time."""

    def __init__(
        self,
        what: str,
        request: Callable[[float], transport.Call[T]],
        final: Collection[str],
        timeout_s: float | None,
    ) -> None:
        """`request`: the call that the service answers within some seconds, or at the end."""
        self._what = what
        self._request = request
        self._final = final
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def next(self) -> transport.Call[T]:
        """Return the next request."""
        wait_s = calls.WAIT_S
        if self._deadline is not None:
            wait_s = round(min(wait_s, max(0.0, self._deadline - time.monotonic())), 3)
        return self._request(wait_s)

    def is_over(self, found: T) -> bool:
        """Return whether an answer is the last one.

        Raises `WaitTimeout` after the time to wait, `ServiceFailed` for an answer without a status.
        """
        status = found.get("status")
        if not isinstance(status, str):
            raise errors.ServiceFailed(f"{self._what}: the answer has no status")
        if status in self._final:
            return True
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise errors.WaitTimeout(f"{self._what} is {status} after the time to wait")
        return False


def job_end(job_id: str, timeout_s: float | None) -> Wait[job_states.JobStatus]:
    """Return the wait until a job is succeeded, failed or canceled."""
    return Wait(
        f"job {job_id!r:.80}",
        lambda wait_s: calls.job_state(job_id, wait_s=wait_s),
        job_states.FINAL,
        timeout_s,
    )


def run_end(run_id: str, timeout_s: float | None) -> Wait[JsonDict]:
    """Return the wait until a run is completed, failed or cancelled."""
    return Wait(
        f"run {run_id!r:.80}",
        lambda wait_s: calls.run_state(run_id, wait_s=wait_s),
        job_states.FINAL_RUN,
        timeout_s,
    )
