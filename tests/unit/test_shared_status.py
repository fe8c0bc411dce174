"""The shared status of a worker and its parent: a write is read whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_workflows.engine import claims
from queue_workflows.worker import shared_status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
WHO = claims.Claimant("w", "box", "cpu")
IDLE = shared_status.worker_record(WHO, None, shown=False)


@pytest.fixture
def parents() -> Iterator[shared_status.SharedStatus]:
    made = shared_status.make()
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def given(parents: shared_status.SharedStatus, monkeypatch: pytest.MonkeyPatch) -> int:
    """The descriptor that this process inherits from its parent, itself."""
    assert parents.fd is not None
    fd = os.dup(parents.fd)
    monkeypatch.setenv(shared_status.VARIABLE, str(fd))
    monkeypatch.setattr(os, "getppid", os.getpid)
    return fd


def test_the_parent_reads_what_its_child_writes(
    parents: shared_status.SharedStatus, given: int
) -> None:
    assert parents.read() == (0, 0, 0, None, False, {})
    own = shared_status.attach()
    own.beat(5.0, IDLE)
    own.begin()
    own.set_active(6.0)
    seen = parents.read()
    assert seen[:3] == (5.0, 1, 6.0)
    assert seen.record == IDLE | {"number": 0}, "the next beat tells of the job"
    own.begin(IDLE)
    assert parents.read() == (5.0, 2, 0, None, False, IDLE | {"number": 2})
    own.end()
    assert parents.read().job == 0
    own.clear()
    assert parents.read() == (0, 0, 0, None, False, {})


def test_the_parent_sees_which_handlers_run(
    parents: shared_status.SharedStatus, given: int
) -> None:
    own = shared_status.attach()
    own.begin()
    assert parents.read().ran is None, "whatever such a worker holds is what it runs"
    own.end()
    own.enable_job_list()
    assert parents.read().ran == frozenset()
    own.begin(seq=77)
    own.begin(seq=2**53)
    assert parents.read().ran == {77, 2**53}
    own.end(seq=77)
    assert parents.read().ran == {2**53}
    assert parents.read().job == 3, "the other runs on"
    own.end(seq=2**53)
    assert parents.read().ran == frozenset()
    assert parents.read().job == 0
    own.begin(seq=78)
    own.clear()
    assert parents.read().ran == frozenset(), "what it still holds when it ends did not kill it"


def test_a_job_of_number_zero_is_shown_like_any(
    parents: shared_status.SharedStatus, given: int
) -> None:
    own = shared_status.attach()
    own.enable_job_list()
    for seq in (0, -1):
        own.begin(seq=seq)
    assert parents.read().ran == {0, -1}
    own.end(seq=0)
    assert parents.read().ran == {-1}


def test_as_many_handlers_are_shown_as_may_run(
    parents: shared_status.SharedStatus, given: int
) -> None:
    own = shared_status.attach()
    own.enable_job_list()
    every = range(1, shared_status.MAX_HANDLERS + 1)
    for _ in range(2):
        for seq in every:
            own.begin(IDLE, seq=seq)
        assert parents.read().ran == {*every}
        assert parents.read().record["host"] == "box", "it lies elsewhere"
        for seq in every:
            own.end(seq=seq)
    assert parents.read().ran == frozenset()


def test_an_inherited_descriptor_is_not_passed_on(
    parents: shared_status.SharedStatus, given: int
) -> None:
    assert shared_status.attach()
    assert shared_status.VARIABLE not in os.environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given)


@pytest.mark.parametrize("whose", ["a file's", "another parent's"])
def test_a_descriptor_of_something_else_is_left_alone(
    parents: shared_status.SharedStatus,
    given: int,
    whose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "file"
    other.write_bytes(bytes(shared_status.SIZE))
    if whose == "a file's":
        with other.open("r+b") as file:
            os.dup2(file.fileno(), given)
    else:
        monkeypatch.setattr(os, "getppid", lambda: 1)
    shared_status.attach().beat(5.0, IDLE)
    assert parents.read().beat == 0
    assert other.read_bytes() == bytes(shared_status.SIZE)
    os.close(given)


def test_a_record_that_breaks_off_leaves_the_one_before(
    parents: shared_status.SharedStatus,
) -> None:
    parents.beat(1.0, IDLE | {"n": 1})
    parents.beat(2.0, IDLE | {"n": 2})
    assert parents.read().record["n"] == 2
    at = parents._memory.find(b'"n": 2')
    parents._memory[at : at + 6] = b'"n": 3'
    assert parents.read().record["n"] == 1


def test_a_record_without_room_is_left_out(parents: shared_status.SharedStatus) -> None:
    parents.beat(1.0, IDLE | {"host": "x" * shared_status.SIZE})
    assert parents.read() == (1.0, 0, 0, None, False, {})
