"""Frames between a worker and its executors survive; anything else in a channel names itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows.claim import outcomes
from queue_workflows.dag import policy
from queue_workflows.run import executors, wire
from queue_workflows.runtime import io_loop
from tests.support.examples import examples
from tests.support.executors import Job, task_row

texts = st.text(st.characters(exclude_categories=()), max_size=30)
Frame = tuple[int, int, bytes]
FRAMES: list[Frame] = [
    (wire.RUN_TASK, 1, b'{"id": "j"}'),
    (wire.QUIT, 0, b""),
    (wire.COMPLETED, 2**32 - 1, b"x" * 70_000),
]


def test_frames_arrive_in_pieces_of_any_size() -> None:
    data = b"".join(wire.frame(*each) for each in FRAMES)
    for size in (1, 3, 8, 9, 10, 1000):
        frames = wire.Frames()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [found for part in parts for found in frames.add(part)] == FRAMES


def test_what_handles_a_frame_may_add_what_came_meanwhile() -> None:
    data = b"".join(wire.frame(*each) for each in FRAMES)
    frames, found = wire.Frames(), list[Frame]()
    for each in frames.add(data + data[:4]):
        found.append(each)
        if len(found) == 1:
            found += frames.add(data[4:])
    assert found == FRAMES + FRAMES
    assert [*frames.add(data)] == FRAMES


@pytest.mark.parametrize(
    "text", [b"printed\n", b"abc\nand more\n", b"\n\n\n\n\n\n\n\n\n", b"{" * 9]
)
def test_text_in_the_channel_is_garbage_at_once(text: bytes) -> None:
    """Its first bytes may be a length that would have the reader wait for megabytes."""
    frames = wire.Frames()
    with pytest.raises(wire.ProtocolError, match=r"^garbage in the channel[^\n]*$"):
        [*frames.add(text + b"." * 9)]


def test_frames_before_garbage_are_delivered_first() -> None:
    received = iter(wire.Frames().add(wire.frame(*FRAMES[0]) + b"garbage everywhere"))
    assert next(received) == FRAMES[0]
    with pytest.raises(wire.ProtocolError):
        next(received)


def test_a_message_that_is_too_large_is_refused() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return wire.MAX_BYTES + 1

    with pytest.raises(wire.ProtocolError, match="more than 268435456"):
        wire.frame(wire.COMPLETED, 1, Huge())


@given(
    st.floats(0, 1e6),
    texts,
    texts,
    st.none() | texts.filter(bool),
    st.none() | st.integers(0, 10**6),
)
def test_a_completed_outcome_survives(
    seconds: float, result: str, error: str, inputs: str | None, rss_mb: int | None
) -> None:
    sent = outcomes.Outcome(
        "completed", seconds, result, error, resolved_inputs=inputs, vm_rss_mb_peak=rss_mb
    )
    assert wire.completed_of(wire.completed_body(sent)) == sent


def test_any_other_outcome_survives() -> None:
    sent = outcomes.Outcome(
        "failed", 1.5, error="E: \ud800", detail="{}", resolved_inputs="{}", vm_rss_mb_peak=7,
        raised=policy.Raised(frozenset({"A", "B"}), "retry", 3), task={"retries": 2},
        cursors=(("epoch", "k", 3),),
    )  # fmt: skip
    assert wire.ended_of(wire.ended_body(sent)) == sent


class Launcher:
    """Keeps the executor's ends of the sockets and pipes, and forks nothing."""

    def fork(self, fds: list[int], *, shared: bool) -> int:
        self.end, self.requests = (socket.socket(fileno=os.dup(fd)) for fd in fds[:2])
        return 1

    def kill(self, pid: int, signum: int) -> bool:
        """Ignore it: there is no process."""
        return True


class Owner:
    """Hears of one job, and fails the test for a value of a wrong type."""

    def __init__(self) -> None:
        self.outcomes: list[outcomes.Outcome] = []
        self.deaths: list[executors.Death] = []

    def ended(self, job: Job, outcome: outcomes.Outcome) -> None:
        assert outcome.seconds + 0.5 < float("inf")
        assert outcome.error.strip() is not None
        self.outcomes.append(outcome)

    def died(self, job: Job, death: executors.Death) -> None:
        self.deaths.append(death)

    def asked(self, job: Job, question: dict[str, Any]) -> None:
        assert question["what"] + str(question["no"] + 1)

    def model(self, model: dict[str, Any]) -> None:
        assert model["held_s"] + model["load_s"] + model["vram_gb"] is not None

    def event(self, job: Job, event_type: str, elapsed_s: float | None) -> None:
        assert event_type + ""

    def printed(self, job: Job, data: bytes) -> None:
        assert data + b"" is not None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Printer:
    def write(self, number: int, data: bytes) -> None:
        """Ignore it."""

    def record(self, pid: int, record: dict[str, Any]) -> None:
        assert record["text"] + record["name"]


class Pair:
    """The worker's end with a job, and raw access to the executor's."""

    def __init__(self) -> None:
        self.loop, self.launcher, self.owner = io_loop.IoLoop(), Launcher(), Owner()
        launcher: Any = self.launcher
        printer: Any = Printer()
        self.executors = executors.Executors(self.loop, launcher, printer, self.owner, slots=1)
        self.executors.closing = True
        self.job = Job(task_row("t"), in_run=False)
        self.executors.start(self.job)
        self.executors.forked({"forked": 1, "pid": os.getpid(), "error": None})
        self.place = next(iter(self.executors))
        self.launcher.end.recv(1 << 16)

    def send(self, data: bytes) -> None:
        self.launcher.end.sendall(data)
        turns = iter([False, True])
        self.loop.wake_at(0.0)
        self.loop.run(lambda _: 0.0, lambda: next(turns))

    def die(self) -> None:
        packet = executors.UNKNOWN | {"died": os.getpid(), "signal": signal.SIGKILL}
        self.executors.died(packet)
        assert all(name + key + str(at + 1) for (name, key), at in self.job.cursors.items())

    def close(self) -> None:
        self.executors.close()
        self.loop.close()
        self.launcher.end.close()
        self.launcher.requests.close()


@pytest.fixture
def pair() -> Generator[Pair]:
    found = Pair()
    yield found
    found.close()


def _json(kind: int, value: Any) -> bytes:
    return wire.frame(kind, 1, json.dumps(value).encode())


ENDED = {
    "kind": "failed", "seconds": 1, "error": "", "detail": None, "received": None, "rss_mb": None,
    "names": [], "wish": "", "after_s": None, "task": None, "cursors": [],
}  # fmt: skip
LOG = {"level": 20, "name": "n", "text": "t", "printed": True, "fields": None}
MODEL = {"current": "m", "loading": None, "load_s": 1, "held_s": 2, "vram_gb": 3}


@pytest.mark.parametrize("data", [_json(wire.LOG, LOG), _json(wire.MODEL, MODEL)])
def test_what_an_executor_sends_itself_is_no_forgery(pair: Pair, data: bytes) -> None:
    pair.send(data)
    assert not pair.place.lost


@pytest.mark.parametrize(
    "data",
    [
        wire.frame(wire.COMPLETED, 1, b"short"),
        wire.frame(wire.COMPLETED, 1, b"\xff" * 40),
        wire.frame(
            wire.COMPLETED, 1, wire.completed_body(outcomes.Outcome("completed", float("nan")))
        ),
        wire.frame(wire.ENDED, 1, b"{"),
        wire.frame(wire.ENDED, 1, b"[" * 6000),
        _json(wire.ENDED, []),
        _json(wire.ENDED, ENDED | {"seconds": "1"}),
        _json(wire.ENDED, ENDED | {"seconds": float("nan")}),
        _json(wire.ENDED, ENDED | {"seconds": -1}),
        _json(wire.ENDED, ENDED | {"kind": "completed"}),
        _json(wire.ENDED, ENDED | {"names": [[]]}),
        _json(wire.ENDED, ENDED | {"cursors": [1]}),
        _json(wire.CURSOR, ["name", "key"]),
        _json(wire.CURSOR, ["name", "key", 1, 2]),
        _json(wire.ASK, {"no": "1", "what": "rows"}),
        _json(wire.ASK, {"no": -1, "what": "rows"}),
        _json(wire.ASK, {"no": 2**32, "what": "rows"}),
        _json(wire.LOG, {"level": "high", "name": "n", "text": "t"}),
        _json(wire.LOG, LOG | {"fields": ["no", "names"]}),
        _json(wire.LOG, LOG | {"printed": None}),
        _json(wire.MODEL, {"current": 1}),
        _json(wire.MODEL, MODEL | {"held_s": float("nan")}),
        _json(wire.MODEL, MODEL | {"vram_gb": float("inf")}),
        _json(wire.EVENT, "e"),
        wire.frame(wire.PROGRESS, 1, b"\xff"),
        wire.frame(wire.QUIT, 1, b""),
    ],
)
def test_a_forged_message_costs_its_own_job_alone(pair: Pair, data: bytes) -> None:
    pair.send(data)
    assert pair.place.lost
    assert "\n" not in pair.place.lost
    assert not pair.owner.outcomes
    pair.die()
    assert len(pair.owner.deaths) == 1


def test_an_outcome_of_another_job_is_dropped(pair: Pair) -> None:
    outcome = outcomes.Outcome("completed", 1.0)
    pair.send(wire.frame(wire.COMPLETED, 2, wire.completed_body(outcome)))
    assert not pair.owner.outcomes
    pair.send(wire.frame(wire.COMPLETED, 1, wire.completed_body(outcome)))
    assert pair.owner.outcomes == [outcome]


def test_an_outcome_that_was_sent_before_the_death_counts(pair: Pair) -> None:
    outcome = outcomes.Outcome("completed", 1.0)
    pair.launcher.end.sendall(wire.frame(wire.COMPLETED, 1, wire.completed_body(outcome)))
    pair.die()
    assert pair.owner.outcomes == [outcome]
    assert not pair.owner.deaths


@settings(max_examples=examples(300))
@given(
    st.sampled_from(range(wire.COMPLETED, wire.LEAVES + 1)),
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from([*ENDED, "no", "what", "level", "name", "text"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=9),
    st.integers(0, 2**16),
)
def test_no_bytes_of_an_executor_end_its_worker(
    kind: int, body: bytes, noise: bytes, place: int
) -> None:
    data = bytearray(wire.frame(kind, 1, body))
    at = place % len(data)
    data[at : at + len(noise)] = noise
    with contextlib.closing(Pair()) as pair:
        pair.send(bytes(data))
        pair.die()
        assert len(pair.owner.deaths) + len(pair.owner.outcomes) == 1


def test_the_end_of_the_worker_is_a_connection_error() -> None:
    ours, theirs = socket.socketpair()
    end = wire.Channel(theirs)
    ours.sendall(wire.frame(*FRAMES[0])[:-1])
    ours.close()
    with pytest.raises(ConnectionError, match="has ended"):
        end.receive()
    with pytest.raises(ConnectionError):
        end.send(wire.PROGRESS, 1)
    theirs.close()
