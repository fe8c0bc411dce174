"""Write and read the journal: one O_APPEND line per start, beat and end of a handler."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

PATH_ENV = "SOAK_JOURNAL"


class Line(NamedTuple):
    """One line: `word` is start, beat or end; `at` is the machine's monotonic clock in seconds.

    `pid` is the process of the worker, which may run the handler in another one.
    """

    word: str
    job: str
    claim: int
    worker: str
    pid: int
    at: float
    what: str


def write(word: str, job: dict[str, Any], what: str) -> None:
    """Append a line about a claimed job in one write; lines of many processes do not mix."""
    pid = int(job["worker_id"].rsplit(":", 3)[1])
    line = [
        word, job["id"], job["claim_no"], job["worker_id"], pid, time.monotonic_ns(), what,
    ]  # fmt: skip
    fd = os.open(os.environ[PATH_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def read(path: Path) -> list[Line]:
    """Return all lines in the order in which they were written."""
    if not path.exists():
        return []
    lines: list[Line] = []
    for text in path.read_text().splitlines():
        word, job, claim, worker, pid, ns, what = json.loads(text)
        lines.append(Line(word, job, claim, worker, pid, ns / 1e9, what))
    return lines
