"""Share memory in which a worker reports to its parent what it runs and when it checked guards."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from queue_workflows import __version__
from queue_workflows.engine import claims, job_tables
from queue_workflows.types import Row
from queue_workflows.worker import current_job, guards

VARIABLE = "QUEUE_WORKFLOWS_STATUS_FD"
"""Names the inherited file descriptor to a child, which removes the variable from its environment.
"""
SIZE = 20480
MAX_HANDLERS = 500
"""The most handlers that one worker runs at once."""
_MAGIC = b"qw-status %-14.14b" % __version__.encode()
"""Contains the version: after an upgrade a new child may run under an older parent."""
_HEADER = struct.Struct("=24sq")
_SLOT = struct.Struct("=QII")
_CELLS = slice(32, 72)
_RUNNING = slice(_CELLS.stop, _CELLS.stop + 8 * MAX_HANDLERS)
_SLOTS = (_RUNNING.stop, _RUNNING.stop + (SIZE - _RUNNING.stop) // 2)
_ROOM = (SIZE - _RUNNING.stop) // 2 - _SLOT.size
_BEAT, _JOB, _ACTIVE, _LISTS, _FENCED = range(5)
_ZERO = 0.5
"""Stands for `seq` 0, which an old row may have, since 0.0 marks an empty cell."""


class Snapshot(NamedTuple):
    """The content of a shared status at one instant; times are those of `clock.boot_s`, 0: none."""

    beat: float
    """When the worker last checked its guards."""
    job: float
    """The number of the job that started last, as the worker counts; 0 if none runs."""
    active_at: float
    """When the handler of that job last showed activity, if its guards use it."""
    ran: frozenset[int] | None
    """The `seq` of the jobs whose handlers run; None: the worker runs all jobs that it has claimed.
    """
    fenced: bool
    """Whether the worker exits without a fault of its jobs, whose claims it could not hand back."""
    record: Row
    """The last record that the worker wrote, see `worker_record`; may be empty."""


class SharedStatus:
    """Status that one process writes and its parent reads.

    A reader never waits and a writer makes no system call. The record has two copies, written in
    turn, each with a checksum, so a stalled writer leaves the other copy intact. `begin`, `end` and
    `beat` must not run at the same time.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        self._memory = memory
        self._cells = memoryview(memory)[_CELLS].cast("d")
        self._running = memoryview(memory)[_RUNNING].cast("d")
        self._handler_slots: dict[int, int] = {}
        """Slot number by the `seq` of each running job."""
        self._free = [*range(MAX_HANDLERS)]
        self._count = 0
        self._version = 0
        self.fd = fd
        """The descriptor that a child inherits; set only in the process that created the memory."""
        self._closing = None if fd is None else weakref.finalize(self, os.close, fd)

    # The worker.

    def enable_job_list(self) -> None:
        """Note that this worker lists its running jobs, since it may have claimed more."""
        self._cells[_LISTS] = 1.0

    def begin(self, record: Mapping[str, Any] | None = None, *, seq: int | None = None) -> None:
        """Note that a job runs; without `record` the next `beat` writes the record.

        `seq` is that of the job if the worker lists its jobs, else None.
        """
        self._count += 1
        self._cells[_ACTIVE] = 0.0
        if seq is not None and self._free:
            self._handler_slots[seq] = slot = self._free.pop()
            self._running[slot] = seq or _ZERO
        if record is not None:
            self._write(record)
        self._cells[_JOB] = self._count

    def fence(self) -> None:
        """Note that the worker exits without a fault of its jobs; see `Snapshot.fenced`."""
        self._cells[_FENCED] = 1.0

    def unfence(self) -> None:
        """Undo `fence`: the worker stays, or has handed all its claims back."""
        self._cells[_FENCED] = 0.0

    def set_active(self, now: float) -> None:
        """Note that the handler showed activity."""
        self._cells[_ACTIVE] = now

    def end(self, *, seq: int | None = None) -> None:
        """Note that a job has ended; `seq` as it was passed to `begin`."""
        slot = None if seq is None else self._handler_slots.pop(seq, None)
        if slot is not None:
            self._running[slot] = 0.0
            self._free.append(slot)
        if not self._handler_slots:
            self._cells[_JOB] = 0.0

    def beat(self, now: float, record: Mapping[str, Any]) -> None:
        """Write the record and note that the worker checked its guards at `now`."""
        self._write(record)
        self._cells[_BEAT] = now

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps({**record, "number": self._count}).encode()
        if len(text) > _ROOM:
            text = b"{}"
        self._version += 1
        at = _SLOTS[self._version % 2]
        _SLOT.pack_into(self._memory, at, self._version, len(text), zlib.crc32(text))
        self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text

    # Its parent, or both.

    def read(self) -> Snapshot:
        """Return the present content."""
        beat, job, active_at, lists_jobs, fenced = self._cells.tolist()
        ran = None
        if lists_jobs:
            ran = frozenset(int(seq) for seq in self._running.tolist() if seq and job)
        return Snapshot(beat, job, active_at, ran, fenced != 0.0, self._read())

    def _read(self) -> Row:
        """Return the newest copy of the record with a valid checksum."""
        slots = [(*_SLOT.unpack_from(self._memory, at), at + _SLOT.size) for at in _SLOTS]
        for _, size, checksum, at in sorted(slots, reverse=True):
            text = self._memory[at : at + min(size, _ROOM)]
            if size and zlib.crc32(text) == checksum:
                return json.loads(text)
        return {}

    def clear(self) -> None:
        """Reset the status: no job runs and nothing is known."""
        for seq in [*self._handler_slots]:
            self.end(seq=seq)
        for cell in (_BEAT, _JOB, _ACTIVE, _FENCED):
            self._cells[cell] = 0.0
        for at in _SLOTS:
            _SLOT.pack_into(self._memory, at, 0, 0, 0)

    def close(self) -> None:
        """Close the descriptor."""
        if self._closing is not None:
            self._closing()


def make() -> SharedStatus | None:
    """Create a shared status for a child, or return None where there is no anonymous file."""
    if sys.platform != "linux":
        return None
    try:
        fd = os.memfd_create("queue-workflows-status")
    except OSError:
        return None
    os.truncate(fd, SIZE)
    memory = mmap.mmap(fd, SIZE)
    _HEADER.pack_into(memory, 0, _MAGIC, os.getpid())
    return SharedStatus(memory, fd)


def attach() -> SharedStatus:
    """Return the status that this process's parent reads, once; afterwards a private one."""
    given = os.environ.pop(VARIABLE, "")
    if given.isdecimal():
        with contextlib.suppress(OSError, ValueError):
            return _inherited(int(given))
    return SharedStatus(mmap.mmap(-1, SIZE))


def _inherited(fd: int) -> SharedStatus:
    memory = mmap.mmap(fd, SIZE)
    # The number may come from a process further up, and be another file here.
    if _HEADER.unpack_from(memory) != (_MAGIC, os.getppid()):
        memory.close()
        raise ValueError(f"descriptor {fd} is not the parent's shared status")
    os.close(fd)
    return SharedStatus(memory)


def worker_record(
    who: claims.Claimant,
    work: current_job.Work | None,
    *,
    shown: bool = False,
    queues: Sequence[str] = (),
) -> Row:
    """Return the record of a worker: pid, host, queue, obey; with a job its lease and guards.

    `shown` says whether the GPU's tools have reported a value yet. `queues` are those whose
    handlers run, if the worker serves several.
    """
    record: Row = {"pid": os.getpid(), "host": who.host, "queue": who.queue, "obey": who.obey}
    record["queues"] = [*queues]
    if work is not None:
        record |= {
            "lease": [work.lease.table.name, *work.lease[1:]],
            "started": work.started,
            "guards": guards.snapshot(work.guards),
            "shown": shown,
        }
    return record


def lease_of(record: Row) -> job_tables.Lease:
    """Return the claim in a record that has one."""
    name, job_id, worker_id, claim_no = record["lease"]
    table = next(t for t in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS) if t.name == name)
    return job_tables.Lease(table, job_id, worker_id, claim_no)
