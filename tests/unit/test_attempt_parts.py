"""Parts that a handler does not send itself are stored by another thread, in order and once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queue_workflows.tasks import attempt_parts, attempt_steps
from queue_workflows.types import JsonDict


class Storing:
    """A control that stores later, and what was sent and stored."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.later: list[attempt_parts.StoreUnsent] = []
        self.parts = attempt_parts.AttemptParts(self.ask, self)

    def store_later(self, store_unsent: attempt_parts.StoreUnsent) -> None:
        self.later.append(store_unsent)

    def ask(self, request: JsonDict) -> attempt_steps.Answered:
        return attempt_steps.answered(lambda: self.store(request))

    def store(self, request: JsonDict) -> JsonDict:
        self.stored += [(request["first"] + n, text) for n, text in enumerate(request["parts"])]
        return {"state": "done"}


@pytest.fixture
def own() -> Storing:
    """One part is stored, and two are left."""
    made = Storing()
    for number in (1, 2, 3):
        made.parts.add("text", number)
    assert made.stored == [(1, "1")]
    assert len(made.later) == 1, "the first part that is left is enough to be noted"
    return made


def let_time_pass(own: Storing) -> None:
    own.parts._sent_at -= attempt_parts.EVERY_S


def test_what_is_left_is_stored_once_it_is_due(own: Storing) -> None:
    assert own.later[0](own.store) is True
    assert own.stored == [(1, "1")]
    let_time_pass(own)
    assert own.later[0](own.store) is False
    assert own.later[0](own.store) is False
    assert own.stored == [(1, "1"), (2, "2"), (3, "3")]
    own.parts.add("text", 4)
    assert len(own.later) == 2
    assert own.parts.rest() is not None
    assert own.stored[3:] == [(4, "4")]


def test_what_could_not_be_stored_is_left(own: Storing) -> None:
    def away(_: JsonDict) -> None:
        raise ConnectionError

    let_time_pass(own)
    with pytest.raises(ConnectionError):
        own.later[0](away)
    own.parts.add("text", 4)
    assert own.parts.rest() is not None
    assert own.stored == [(n, str(n)) for n in (1, 2, 3, 4)]
    assert own.parts.rest() is None


def test_the_handler_waits_for_a_batch_under_way_but_is_never_waited_for(own: Storing) -> None:
    let_time_pass(own)
    begun, go = threading.Event(), threading.Event()

    def slow(request: JsonDict) -> None:
        begun.set()
        assert go.wait(30)
        own.store(request)

    storing = threading.Thread(target=own.later[0], args=(slow,))
    storing.start()
    assert begun.wait(30)
    handler = threading.Thread(target=own.parts.add, args=("text", 4))
    handler.start()
    assert own.parts.store_unsent(own.store) is True, "it returns at once"
    handler.join(0.1)
    assert handler.is_alive() and own.stored == [(1, "1")]
    go.set()
    storing.join(30)
    handler.join(30)
    own.parts.rest()
    assert own.stored == [(n, str(n)) for n in (1, 2, 3, 4)]
