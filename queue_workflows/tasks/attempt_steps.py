"""Hold an attempt's steps: how to reach their recorder, the names used, and loop positions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeAlias

from queue_workflows import errors
from queue_workflows.types import JsonDict

Answered: TypeAlias = "futures.Future[JsonDict]"
Ask: TypeAlias = Callable[[JsonDict], Answered]
"""Sends a request for `engine.job_steps.answer`, and returns its answer to come; thread-safe.

An answer that cannot be had raises `DatabaseUnavailable`.
"""


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


class AttemptSteps:
    """The steps of one attempt: who records them, which names it has used, and its cursors."""

    def __init__(self, ask: Ask, control: object) -> None:
        """`control`: its `note_cursor`, if it has one, takes how far cursors are for its worker."""
        self.ask = ask
        self._control = control
        self.cursors: dict[tuple[str, str], int] = {}
        """How many items of each cursor are done that has not ended, by its name and key."""
        self._lock = threading.Lock()
        self._used: set[tuple[str, ...]] = set()

    def use(self, *identity: str) -> bool:
        """Return whether a step of this kind, name and key is the first one in this attempt."""
        with self._lock:
            is_first = identity not in self._used
            self._used.add(identity)
            return is_first

    def note(self, name: str, key: str, position: int) -> None:
        """Note how many items of a cursor are done."""
        self.cursors[name, key] = position
        if (note := getattr(self._control, "note_cursor", None)) is not None:
            note(name, key, position)


def value_of(answer: Any) -> JsonDict:
    """Return an answer; raise `ClaimLost` if the claim is lost."""
    if answer["state"] == "lost":
        raise errors.ClaimLost(
            "this job was given to another worker: its step or stream was not recorded"
        )
    return answer
