"""Write and read the journal: one O_APPEND line per start, beat and end of a handler."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

PATH_ENV = "SOAK_JOURNAL"
TAIL_BYTES = 1 << 18
ENDS = ("end", "snooze")
"""Words of a line after which the handler has no effect any more."""


class Line(NamedTuple):
    """One line: `word` is start, beat or end; `at` is the machine's monotonic clock in seconds.

    `pid` is the process of the worker, `runs_in` the process of the handler: the same, or an
    executor.
    """

    word: str
    job: str
    claim: int
    worker: str
    pid: int
    at: float
    what: str
    runs_in: int = 0


def write(word: str, job: dict[str, Any], what: str) -> None:
    """Append a line about a claimed job in one write; lines of many processes do not mix."""
    line = [
        word, job["id"], job["claim_no"], job["worker_id"], worker_pid(job), time.monotonic_ns(),
        what, os.getpid(),
    ]  # fmt: skip
    fd = os.open(os.environ[PATH_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def worker_pid(job: dict[str, Any]) -> int:
    """Return the process of the worker that has claimed this job."""
    return int(job["worker_id"].rsplit(":", 3)[1])


def read(path: Path) -> list[Line]:
    """Return all lines in the order in which they were written."""
    if not path.exists():
        return []
    return [_line(text) for text in path.read_bytes().splitlines()]


def running(path: Path, *, runs_in: int) -> set[tuple[str, int]]:
    """Return the jobs and claims whose handlers run in this process, by the last `TAIL_BYTES`."""
    if not path.exists():
        return set()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        texts = file.read().splitlines()[size > TAIL_BYTES :]
    last = {(line.job, line.claim): line for line in map(_line, texts) if line.runs_in == runs_in}
    return {claim for claim, line in last.items() if line.word not in ENDS}


def _line(text: bytes) -> Line:
    word, job, claim, worker, pid, ns, what, runs_in = json.loads(text)
    return Line(word, job, claim, worker, pid, ns / 1e9, what, runs_in)
