"""Give each measurement its server, its time budget and the libraries to compare with."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks import processes
from benchmarks.server import Server

if TYPE_CHECKING:
    from benchmarks.peers import Peer

T = TypeVar("T")


class Bench:
    """One run of the benchmark."""

    def __init__(
        self, server: Server, scratch: Path, *, quick: bool, peers: Sequence[Peer] = ()
    ) -> None:
        self.server = server
        self.quick = quick
        self._peers = peers
        self._scratch = scratch
        self._begun = time.monotonic()

    def peers(self, role: str) -> list[Peer]:
        """Return the libraries to compare with that can do this."""
        return [peer for peer in self._peers if peer.can(role)]

    def pick(self, full: T, quick: T) -> T:
        """Return the size for this run."""
        return quick if self.quick else full

    def rounds(self, full: int, quick: int, *, full_s: float, quick_s: float) -> Iterator[int]:
        """Yield rounds up to a number; except the first, begin none that would end too late."""
        begun = time.monotonic()
        limit = self.pick(full_s, quick_s)
        for done in range(self.pick(full, quick)):
            spent = time.monotonic() - begun
            if done and spent * (done + 1) / done > limit:
                self.say(f"{done} rounds took {spent:.0f} s: no more")
                return
            yield done

    def say(self, text: str) -> None:
        """Print progress on stderr."""
        sys.stderr.write(f"{time.monotonic() - self._begun:6.1f} s  {text}\n")
        sys.stderr.flush()

    @contextmanager
    def running(
        self, dsn: str, *commands: tuple[str, list[str]]
    ) -> Generator[list[processes.Process]]:
        """Run these processes on that database."""
        with processes.running(dsn, self._scratch, *commands) as started:
            yield started

    def finish(self, dsn: str, name: str, argv: list[str], timeout_s: float = 120.0) -> None:
        """Run one process to its end."""
        with processes.running(dsn, self._scratch, (name, argv)) as (process,):
            process.wait(timeout_s)


def until(
    true: Callable[[], object],
    what: str,
    watched: Sequence[processes.Process] = (),
    *,
    timeout_s: float = 120.0,
    every_s: float = 0.02,
) -> None:
    """Wait for a condition; an error that names it after `timeout_s`, or when a process ends."""
    deadline = time.monotonic() + timeout_s
    while not true():
        for process in watched:
            process.check()
        if time.monotonic() >= deadline:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)
