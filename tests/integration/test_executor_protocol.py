"""Messages survive the channel, and garbage in it is an error that names itself."""

from __future__ import annotations

import datetime
import math
import os
import random
import socket
import struct
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import types
from queue_workflows.dag import policy
from queue_workflows.engine import outcomes
from queue_workflows.executor import channel, codec, protocol
from tests.support.examples import examples

AT = datetime.datetime(2026, 3, 4, 5, 6, 7, 8, tzinfo=datetime.timezone.utc)
EXAMPLES: list[protocol.Message] = [
    protocol.Run(1, "node", {"id": "j", "at": AT, "inputs": {"x": [1, None]}}, {"created_at": AT}),
    protocol.Announce(1, {}, {}),
    protocol.Forget(1),
    protocol.Waits(1),
    protocol.Started(1),
    protocol.Answer(2, "context", {"a": math.inf}, None),
    protocol.Load("m"),
    protocol.Unload(idle_only=True),
    protocol.Quit(),
    protocol.Cancel(3, "cancelled"),
    protocol.Recall(9),
    protocol.Progress(4, '{"a": 1}'),
    protocol.Log(None, 30, "app", "text \ud800 with a lone surrogate", printed=False),
    protocol.Model("m", None, 1.0, 2, 3.5),
    protocol.ModelDone("no weights"),
    protocol.Event(1, "model_load_done", None),
    protocol.Ask(1, "rows"),
    protocol.Outcome(
        1,
        "failed",
        1.5,
        "{}",
        "E: é",
        None,
        None,
        7,
        ["E"],
        "retry",
        2,
        {"a": 1},
        [["epoch", "", 3]],
    ),
    protocol.CursorAt(1, "epoch", "k", 3),
    protocol.Recalled([1, 2]),
    protocol.Announced(1),
    protocol.Loaded({"nodes": []}, None),
    protocol.Fork(1, concurrent=False, batched=True),
    protocol.Hold(12.5),
    protocol.Forked(1, 99, None),
    protocol.Died(99, None, 9, True, 12, 0.1, 0.2, False),
]


class Pair:
    """A worker's end, an executor's end, and raw access to what comes out of it."""

    def __init__(self) -> None:
        self.raw, other = socket.socketpair()
        self.inbox = channel.Channel(other, blocking=False)

    def received(self, data: bytes) -> list[protocol.Message]:
        self.raw.sendall(data)
        return self.inbox.receive()


@pytest.fixture
def pair() -> Generator[Pair]:
    found = Pair()
    yield found
    found.raw.close()
    found.inbox.close()


def test_each_message_has_an_example() -> None:
    assert {type(each).__name__ for each in EXAMPLES} == set(protocol.KINDS)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(pair: Pair, message: protocol.Message) -> None:
    assert pair.received(codec.encode(message)) == [message]


def test_several_messages_arrive_from_one_send(pair: Pair) -> None:
    assert pair.received(codec.encode(*EXAMPLES)) == EXAMPLES


def test_a_value_that_cannot_be_loaded_stays_one(pair: Pair) -> None:
    row = {"inputs": types.Unreadable("too deep", b"\xff[[")}
    (found,) = pair.received(codec.encode(protocol.Run(1, "node", row, None)))
    assert isinstance(found, protocol.Run)
    assert (found.job["inputs"].reason, found.job["inputs"].raw) == ("too deep", b"\xff[[")


def test_data_that_looks_like_a_tagged_value_stays_data(pair: Pair) -> None:
    row = {"a": {"\\u0000time": "x"}, "b": '{"\\u0000time": "2026"}', "c": {"time": "x"}}
    assert pair.received(codec.encode(protocol.Run(1, "node", row, None)))[0].job == row  # type: ignore[union-attr]


def test_an_outcome_survives_as_a_message() -> None:
    raised = policy.Raised(frozenset({"A", "B"}), "retry", 3)
    outcome = outcomes.Outcome(
        "failed",
        1.0,
        error="E",
        detail="{}",
        raised=raised,
        task={"retries": 2},
        cursors=(("epoch", "k", 3),),
    )
    assert protocol.outcome_of(protocol.message_of(1, outcome)) == outcome


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_messages_arrive_in_pieces(pair: Pair, size: int) -> None:
    data = codec.encode(*EXAMPLES)
    found: list[protocol.Message] = []
    for at in range(0, len(data), size):
        found += pair.received(data[at : at + size])
    assert found == EXAMPLES


def test_a_large_message_arrives_between_small_ones() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = (channel.Channel(end, blocking=False) for end in (ours, theirs))
    large = protocol.Progress(1, "ä" * 3_000_000)
    sent = [protocol.Quit(), large, protocol.Recall(1), protocol.Quit()]
    sender.send(*sent[:2])
    sender.send(*sent[2:])
    found: list[protocol.Message] = []
    while len(found) < len(sent):
        assert sender.pending or found
        sender.flush()
        found += receiver.receive()
    assert found == sent
    assert not sender.pending
    assert len(receiver._inbox._buffer) <= 2 * channel.SIZE or not receiver.receive()
    for end in (sender, receiver):
        end.close()


def test_a_worker_that_sends_to_a_silent_executor_does_not_wait() -> None:
    ours, theirs = socket.socketpair()
    sender = channel.Channel(ours, blocking=False)
    for _ in range(100):
        sender.send(protocol.Progress(1, "x" * 100_000))
    assert sender.pending
    theirs.close()
    with pytest.raises(protocol.ChannelLost):
        sender.flush()
    sender.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"hello, this is printed text\n", "garbage in the channel: 'hello, this is"),
        (b"qw\xff" + bytes([9]) + struct.pack("!I", 2) + b"[]", "version 9"),
        (codec.HEADER.pack(codec.MAGIC, 1, 2**32 - 1), "4294967295 bytes"),
        (codec.HEADER.pack(codec.MAGIC, 1, 2) + b"[]", "no array"),
        (codec.HEADER.pack(codec.MAGIC, 1, 2) + b"{}", "no array"),
        (codec.HEADER.pack(codec.MAGIC, 1, 3) + b"[1]", "an unknown kind"),
        (codec.HEADER.pack(codec.MAGIC, 1, 7) + b'["Nix"]', "an unknown kind"),
        (codec.HEADER.pack(codec.MAGIC, 1, 9) + b'["Recall"', "garbage in the channel ("),
        (codec.HEADER.pack(codec.MAGIC, 1, 10) + b'["Recall"]', "Recall has 1 fields, not 0"),
        (codec.HEADER.pack(codec.MAGIC, 1, 15) + b'["Recall",true]', "of type bool"),
        (codec.HEADER.pack(codec.MAGIC, 1, 4) + b"\xff\xff\xff\xff", "garbage in the channel ("),
        (codec.HEADER.pack(codec.MAGIC, 1, 6000) + b"[" * 6000, "garbage in the channel ("),
        (codec.HEADER.pack(codec.MAGIC, 1, 6000) + b"[" + b"9" * 5998 + b"]", "garbage"),
        (
            codec.HEADER.pack(codec.MAGIC, 1, 45)
            + b'["Run",1,"n",{"a":{"\\u0000time":"x"}},null]'.ljust(45),
            "garbage in the channel (Invalid isoformat",
        ),
    ],
)
def test_garbage_is_an_error_that_names_itself(pair: Pair, data: bytes, text: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=r"^[^\n]{1,400}$") as caught:
        pair.received(data)
    assert text in str(caught.value)
    with pytest.raises(protocol.ProtocolError):
        pair.inbox.receive()


def test_messages_before_garbage_are_delivered_first(pair: Pair) -> None:
    assert pair.received(codec.encode(protocol.Quit()) + b"printed text") == [protocol.Quit()]
    with pytest.raises(protocol.ProtocolError):
        pair.inbox.receive()


def test_messages_before_the_end_are_delivered_first(pair: Pair) -> None:
    pair.raw.sendall(codec.encode(protocol.Quit()))
    pair.raw.close()
    assert pair.inbox.receive() == [protocol.Quit()]
    with pytest.raises(protocol.ChannelLost):
        pair.inbox.receive()


def test_half_a_message_at_the_end_is_a_lost_channel(pair: Pair) -> None:
    assert pair.received(codec.encode(protocol.Quit())[:-1]) == []
    pair.raw.close()
    with pytest.raises(protocol.ChannelLost):
        pair.inbox.receive()


def test_a_header_alone_takes_no_memory(pair: Pair) -> None:
    pair.received(codec.HEADER.pack(codec.MAGIC, 1, codec.MAX_BYTES) + b"x" * 100_000)
    pair.received(b"x" * 100_000)
    assert len(pair.inbox._inbox._buffer) < 1_000_000


def receive_for_ever(inbox: channel.Channel) -> None:
    while True:
        for message in inbox.receive():
            assert type(message).__name__ in protocol.KINDS


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.integers(0, len(EXAMPLES) - 1), st.integers(0, 2**16))
def test_any_damage_is_a_message_or_an_error(noise: bytes, number: int, place: int) -> None:
    pair = Pair()
    data = bytearray(codec.encode(EXAMPLES[number]))
    at = place % len(data)
    data[at : at + len(noise)] = noise
    pair.raw.sendall(bytes(data))
    pair.raw.close()
    with pytest.raises((protocol.ProtocolError, protocol.ChannelLost), match=r"^[^\n]+$"):
        receive_for_ever(pair.inbox)
    pair.inbox.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=examples(60))
@given(st.lists(json_values, max_size=3), st.integers())
def test_any_value_survives(values: list[Any], seed: int) -> None:
    pair, chance = Pair(), random.Random(seed)
    try:
        sent = [protocol.Answer(n, "rows", value, None) for n, value in enumerate(values)]
        data = codec.encode(*sent)
        found: list[protocol.Message] = []
        while data:
            size = chance.randint(1, len(data))
            found += pair.received(data[:size])
            data = data[size:]
        assert found == sent
    finally:
        pair.raw.close()
        pair.inbox.close()


@pytest.mark.parametrize(
    "value", [object(), {1: 2, "a": object()}, b"bytes"], ids=["object", "nested", "bytes"]
)
def test_a_message_that_json_cannot_carry_is_refused_and_nothing_is_sent(value: Any) -> None:
    ours, theirs = socket.socketpair()
    sender = channel.Channel(ours, blocking=False)
    with pytest.raises(protocol.ProtocolError, match="Answer message cannot"):
        sender.send(protocol.Answer(1, "rows", value, None))
    sender.send(protocol.Quit())
    assert channel.Channel(theirs, blocking=False).receive() == [protocol.Quit()]
    ours.close()
    theirs.close()


def test_a_value_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(protocol.ProtocolError, match="cannot be sent"):
        codec.encode(protocol.Answer(1, "rows", endless, None))


def test_descriptors_come_along_with_messages() -> None:
    ours, theirs = (channel.FdChannel(each, blocking=True) for each in socket.socketpair())
    reader, writer = os.pipe()
    ours.send_fds(protocol.Fork(1, concurrent=True, batched=False), writer)
    os.close(writer)
    assert theirs.receive() == [protocol.Fork(1, concurrent=True, batched=False)]
    os.write(theirs.fds[0], b"!")
    assert os.read(reader, 1) == b"!"
    os.close(theirs.fds.popleft())
    os.close(reader)
    ours.close()
    theirs.close()
