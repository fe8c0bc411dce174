"""Connect a running handler with its worker: reports and questions one way, interrupts back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from typing import Any, Protocol, TypeAlias

from queue_workflows import errors
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
LAST_YIELDS = 100
"""Yields that a handler may do after it yielded a signal; then it is closed, which raises."""
Answered: TypeAlias = "futures.Future[JsonDict]"
Ask: TypeAlias = Callable[[JsonDict], Answered]
"""Sends a request for `claim.job_steps.answer`, and returns its answer to come; thread-safe.

An answer that cannot be had raises `DatabaseUnavailable`.
"""


class Control(Protocol):
    """The worker's side of one handler, for example `run.running.Running`; thread-safe."""

    def report_progress(self, value: Any) -> None:
        """Report activity, and progress if the value is 0 to 1, a text or a dict."""

    def note_cursor(self, name: str, key: str, position: int) -> None:
        """Report how many items of a cursor are done."""

    def send_later(self, flush: Callable[[Callable[[JsonDict], object]], object]) -> None:
        """Soon call `flush` with a function that sends a request and waits for no answer."""

    @property
    def interrupted(self) -> str | None:
        """Return why the handler is to end (`cancelled`, `shutdown`), or None."""

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job was cancelled."""
        ...

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        """Set the function to call on an interrupt, at once if it came before; None removes it."""


class Interrupted(Exception):
    """A handler was requested to end and has ended; raised in the caller, not in the handler."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Suspended(BaseException):
    """The handler waits: its attempt ends, uncounted, and it is called again when the wait is over.

    It is not an `Exception`, so that a handler which catches every error does not end its own wait.
    """


def not_clean(error: BaseException) -> None:
    """Log that a handler raised another error after it was requested to end."""
    _log.warning("a task that was requested to end raised %s", type(error).__name__, exc_info=error)


def refuse(_: JsonDict) -> Answered:
    """Raise `InvalidConfig`: nothing records the steps of this handler."""
    raise errors.InvalidConfig(
        "nothing records steps here: a handler has them if a worker runs it on a claimed job"
    )


def answered(call: Callable[[], JsonDict]) -> Answered:
    """Return the value of the call, or its error, as an answer."""
    found = futures.Future[JsonDict]()
    try:
        found.set_result(call())
    except Exception as error:  # noqa: BLE001  raised where the answer is taken
        found.set_exception(error)
    return found


def value_of(answer: Any) -> JsonDict:
    """Return an answer; raise `ClaimLost` if the claim is lost."""
    if answer["state"] == "lost":
        raise errors.ClaimLost(
            "this job was given to another worker: its step or stream was not recorded"
        )
    return answer
