"""A page of shared memory on which a worker shows its parent that it judges, and what it judges."""

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

VARIABLE = "QUEUE_WORKFLOWS_BOARD_FD"
"""Tells a child the descriptor that it inherits; taken out of its environment when used."""
SIZE = 20480
PLACES = 500
"""How many bodies a worker runs at once at most."""
_MAGIC = b"qw-board %-15.15b" % __version__.encode()
"""After an upgrade a child may start below an older parent, which would not understand it."""
_HEADER = struct.Struct("=24sq")
_SLOT = struct.Struct("=QII")
_CELLS = slice(32, 80)
_RUNNING = slice(_CELLS.stop, _CELLS.stop + 8 * PLACES)
_SLOTS = (_RUNNING.stop, _RUNNING.stop + (SIZE - _RUNNING.stop) // 2)
_ROOM = (SIZE - _RUNNING.stop) // 2 - _SLOT.size
_BEAT, _JOB, _HEARD, _TELLS, _DUE, _FENCED = range(6)
_ZERO = 0.5
"""Stands for the `seq` 0, which an old row may have: a cell of 0.0 is empty."""


class Seen(NamedTuple):
    """What a board showed at one instant; instants are those of `clock.boot_s`, 0: none."""

    beat: float
    """When the worker judged last."""
    job: float
    """The number of the job that began last, counted by its worker; 0: none runs."""
    heard: float
    """When the body of that job last showed life, if its guards want to know."""
    ran: frozenset[int] | None
    """The `seq` of the jobs whose bodies run; None: this worker runs all that it holds."""
    due: int | None
    """The `seq` of the job for whose budget the kernel timer is armed; None: it tells none."""
    fenced: bool
    """Whether it ends itself because the database kept it from renewing its leases."""
    record: Row
    """What the worker said of itself and of its job last: see `account`. May be empty."""


class SharedStatus:
    """One process writes it, its parent reads it.

    A reader never waits and a writer makes no system call. The record has two slots in turn, each
    with a checksum: a writer that is held up in the middle of one leaves the other. `begin`, `end`
    and `beat` must not run side by side.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        self._memory = memory
        self._cells = memoryview(memory)[_CELLS].cast("d")
        self._running = memoryview(memory)[_RUNNING].cast("d")
        self._places: dict[int, int] = {}
        """Of each `seq` that runs, where it stands."""
        self._free = [*range(PLACES)]
        self._count = 0
        self._turn = 0
        self.fd = fd
        """The descriptor that a child inherits; only in the process that made the board."""
        self._closing = None if fd is None else weakref.finalize(self, os.close, fd)

    # The worker.

    def tell(self) -> None:
        """This worker may hold more jobs than those that run: it tells which do."""
        self._cells[_TELLS] = 1.0

    def begin(self, record: Mapping[str, Any] | None = None, *, seq: int | None = None) -> None:
        """A job runs from now on; without its record the next `beat` brings that.

        `seq`: that of the job, in a worker that tells; None in any other.
        """
        self._count += 1
        self._cells[_HEARD] = 0.0
        if seq is not None and self._free:
            self._places[seq] = place = self._free.pop()
            self._running[place] = seq or _ZERO
        if record is not None:
            self._write(record)
        self._cells[_JOB] = self._count

    def due(self, seq: int) -> None:
        """Of the jobs that run this one's budget ends first."""
        self._cells[_DUE] = seq or _ZERO

    def fence(self) -> None:
        """The worker ends itself now, because the database kept it from renewing its leases."""
        self._cells[_FENCED] = 1.0

    def heard(self, now: float) -> None:
        """The body showed life."""
        self._cells[_HEARD] = now

    def end(self, *, seq: int | None = None) -> None:
        """A job has ended; `seq` as it was given to `begin`."""
        place = None if seq is None else self._places.pop(seq, None)
        if place is not None:
            self._running[place] = 0.0
            self._free.append(place)
        if not self._places:
            self._cells[_JOB] = 0.0

    def beat(self, now: float, record: Mapping[str, Any]) -> None:
        """The worker judges, now."""
        self._write(record)
        self._cells[_BEAT] = now

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps({**record, "number": self._count}).encode()
        if len(text) > _ROOM:
            text = b"{}"
        self._turn += 1
        at = _SLOTS[self._turn % 2]
        _SLOT.pack_into(self._memory, at, self._turn, len(text), zlib.crc32(text))
        self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text

    # Its parent, and both.

    def read(self) -> Seen:
        """What it shows now."""
        beat, job, heard, tells, due, fenced = self._cells.tolist()
        ran = None
        if tells:
            ran = frozenset(int(seq) for seq in self._running.tolist() if seq and job)
        due_seq = int(due) if due else None
        return Seen(beat, job, heard, ran, due_seq, fenced != 0.0, self._read())

    def _read(self) -> Row:
        """The newest slot that is whole."""
        slots = [(*_SLOT.unpack_from(self._memory, at), at + _SLOT.size) for at in _SLOTS]
        for _, size, checksum, at in sorted(slots, reverse=True):
            text = self._memory[at : at + min(size, _ROOM)]
            if size and zlib.crc32(text) == checksum:
                return json.loads(text)
        return {}

    def clear(self) -> None:
        """Nobody judges, and nothing is known."""
        for seq in [*self._places]:
            self.end(seq=seq)
        for cell in (_BEAT, _JOB, _HEARD, _FENCED):
            self._cells[cell] = 0.0
        for at in _SLOTS:
            _SLOT.pack_into(self._memory, at, 0, 0, 0)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._closing is not None:
            self._closing()


def make() -> SharedStatus | None:
    """A board for a child of this process; None where there is no anonymous file to share."""
    if sys.platform != "linux":
        return None
    try:
        fd = os.memfd_create("queue-workflows-board")
    except OSError:
        return None
    os.truncate(fd, SIZE)
    memory = mmap.mmap(fd, SIZE)
    _HEADER.pack_into(memory, 0, _MAGIC, os.getpid())
    return SharedStatus(memory, fd)


def attach() -> SharedStatus:
    """The board that this process's parent reads, for the first who asks; else one nobody reads."""
    given = os.environ.pop(VARIABLE, "")
    if given.isdecimal():
        with contextlib.suppress(OSError, ValueError):
            return _inherited(int(given))
    return SharedStatus(mmap.mmap(-1, SIZE))


def _inherited(fd: int) -> SharedStatus:
    memory = mmap.mmap(fd, SIZE)
    # A number that a process further up was told may mean any other file here.
    if _HEADER.unpack_from(memory) != (_MAGIC, os.getppid()):
        memory.close()
        raise ValueError(f"descriptor {fd} is no board of the parent's")
    os.close(fd)
    return SharedStatus(memory)


def account(
    who: claims.Claimant,
    work: current_job.Work | None,
    *,
    shown: bool = False,
    queues: Sequence[str] = (),
) -> Row:
    """The record of a worker: pid, host, queue, obey; with a job its lease, started, and guards.

    `shown`: whether the GPU's tools have shown a number yet. `queues`: those whose bodies run, of
    a worker of several.
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
    """The claim of a record that has one."""
    name, job_id, worker_id, claim_no = record["lease"]
    table = next(t for t in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS) if t.name == name)
    return job_tables.Lease(table, job_id, worker_id, claim_no)
