"""Send jobs to the executors of a worker, kill them, and report how they died."""

from __future__ import annotations

import contextlib
import select
import signal
import threading
from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors
from queue_workflows.executor import channel, launcher_client, protocol
from queue_workflows.runtime import log_context, printed_lines
from queue_workflows.telemetry import memory_files
from queue_workflows.types import JsonDict, Row
from queue_workflows.worker import current_job

TAIL = 2000
"""Bytes of a job's last output that are kept for the record of a death."""
PAGE_KB = 4


class Handle:
    """One executor of this worker, and the jobs that it has been sent."""

    def __init__(
        self, forked: launcher_client.Executor, *, concurrent: bool = False, batched: bool = False
    ) -> None:
        """`concurrent`: it runs all its jobs at once. `batched`: one after the other.

        Its length: the members are documented here.
        """
        self.forked = forked
        self.pid = forked.pid
        self.concurrent = concurrent
        self.shared = concurrent or batched
        """Whether it has several jobs; what they print comes as messages, not by its pipes."""
        self._works: dict[int, current_job.Work] = {}
        """Its jobs by key, in the order in which they were sent, until their outcomes are here."""
        self._last_key = 0
        self.jobs = 0
        """How many jobs it has been sent."""
        self._mb_before = 0.0
        """Its memory before its first job."""
        self.announcing = False
        """Whether it runs the hook of a completed job."""
        self.changing = False
        """Whether it loads or unloads a model on request."""
        self.isolated = False
        """Whether its job is to be its only one."""
        self.extra = False
        """Whether it was forked for one job, beside the executors that are replaced."""
        self.full = False
        """Whether it gets no further job."""
        self._recalled = 0
        """Jobs up to this key were recalled."""
        self.retired = False
        """Whether it ends by itself, since it gets no further job."""
        self.lost: str | None = None
        """Why its channel cannot be used any more."""
        self.lost_at = 0.0
        self.exited = False
        """Whether its process has ended."""
        self.died: protocol.Died | None = None
        self.killed_for = ""
        """Why this worker has killed it, as in `job 5f0c...`."""
        self.tail = b""
        self._lines = printed_lines.Pipes(forked.pid) if printed_lines.is_wanted() else None
        self._killed: set[int] = set()
        self._lock = threading.Lock()
        """Held while the jobs change, so that no thread kills the executor for an earlier one."""

    def run(self, work: current_job.Work, family: str, job: Row, run: Row | None) -> None:
        """Send a job; raise `ChannelLost` if the executor has gone."""
        with self._lock:
            if not self._works:
                self.tail = b""
            self._last_key += 1
            self._works[self._last_key] = work
        if not self.jobs:
            self._mb_before = self._memory_mb()
        self.jobs += 1
        self.forked.jobs.send(protocol.Run(self._last_key, family, job, run))

    @property
    def count(self) -> int:
        """Return how many of its jobs have no outcome yet."""
        return len(self._works)

    @property
    def first(self) -> current_job.Work | None:
        """Return the job that runs, in an executor that runs one at a time."""
        return next(iter(self._works.values()), None)

    def get(self, key: int) -> current_job.Work | None:
        """Return the job of this key if it has no outcome yet."""
        return self._works.get(key)

    def key_of(self, work: current_job.Work) -> int | None:
        """Return the key of a job that has no outcome yet; None for any other."""
        return next((key for key, each in [*self._works.items()] if each is work), None)

    def take(self, key: int) -> current_job.Work | None:
        """Return the job of this key, which runs no more, or None."""
        with self._lock:
            return self._works.pop(key, None)

    def take_all(self) -> list[current_job.Work]:
        """Return its jobs, which run no more, in the order in which they were sent."""
        with self._lock:
            works, self._works = [*self._works.values()], {}
            return works

    def interrupt(self, work: current_job.Work) -> None:
        """Request that the handler ends; called on the lease keeper's threads."""
        with self._lock, contextlib.suppress(errors.QueueWorkflowsError):
            if (key := self.key_of(work)) is not None:
                self.forked.control.send(protocol.Cancel(key, work.interrupted or "shutdown"))

    def kill_job(self, work: current_job.Work, signum: int) -> None:
        """Send a signal if this job still runs; called on the lease keeper's threads."""
        with self._lock:
            if work.waiting or self.key_of(work) is None:
                return
            if self.concurrent or self.first is work:
                self.killed_for = f"job {work.job['id']}"
                self.kill(signum)

    def kill_idle(self, reason: str) -> None:
        """End the process if it has no job; called on the lease keeper's threads."""
        with self._lock:
            if not self._works and not self._killed:
                self.killed_for = reason
                self.kill(signal.SIGKILL)

    @property
    def is_recalled(self) -> bool:
        """Return whether the jobs that wait in it have been asked back."""
        return self._recalled == self._last_key

    def recall(self) -> None:
        """Ask for the jobs back whose handlers have not started."""
        if not self.is_recalled:
            self._recalled = self._last_key
            with contextlib.suppress(errors.QueueWorkflowsError):
                self.forked.control.send(protocol.Recall(self._last_key))

    def retire(self) -> None:
        """Let the process end by itself."""
        self.retired = True
        with contextlib.suppress(errors.QueueWorkflowsError):
            self.forked.jobs.send(protocol.Quit())

    def kill(self, signum: int) -> None:
        """Send a signal to the process and its children, each signal once."""
        if signum not in self._killed and self.died is None:
            self._killed.add(signum)
            self.forked.kill(signum)

    def kill_children(self) -> None:
        """Kill what the handlers of an ended executor have left in its process group."""
        if self.died is None:
            self.forked.kill(signal.SIGKILL)

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the process has ended, for so long at most."""
        if not self.exited and self.forked.pidfd >= 0:
            poller = select.poll()
            poller.register(self.forked.pidfd, select.POLLIN)
            poller.poll(timeout_s * 1000)

    @property
    def was_killed(self) -> bool:
        """Return whether this worker has killed it."""
        return bool(self._killed)

    def printed(self, data: bytes) -> None:
        """Keep the end of what the job prints."""
        self.tail = (self.tail + data)[-TAIL:]

    def lines(self, number: int, data: bytes | None) -> bytes:
        """Return what it has printed as this process prints it; None: the end of the last line."""
        if self._lines is None:
            return data or b""
        work = None if self.shared else self.first
        with log_context.bound({} if work is None else work.ids):
            return self._lines.end(number) if data is None else self._lines.add(number, data)

    def rss_mb(self) -> float:
        """Return the memory of the process now, in MB; 0.0 if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii")
            return int(text.split()[1]) * PAGE_KB / 1024
        except (OSError, ValueError, IndexError):
            return 0.0

    def grown_mb(self) -> float:
        """Return by how many MB its jobs have enlarged the process, also by swapped pages."""
        return self._memory_mb() - self._mb_before if self.jobs else 0.0

    def _memory_mb(self) -> float:
        found = memory_files.File(Path(f"/proc/{self.pid}/status")).numbers(b"VmRSS", b"VmSwap")
        return sum(each or 0 for each in found) / 1024

    def close(self) -> None:
        """Close its descriptors."""
        self.forked.close()


class Death(NamedTuple):
    """How an executor died while its job ran: one line, and the detail of the `death` event."""

    evidence: str
    detail: JsonDict


def death(handle: Handle, oom_kills: int | None, seconds: float, others: int = 0) -> Death:
    """Return how an executor died that nobody here has killed, and that ran `others` as well."""
    died = handle.died
    how, detail = "ended for an unknown reason", JsonDict()
    if died is not None:
        how = _how(died)
        detail = {
            "exit_code": died.code,
            "signal": died.signal,
            "core": died.core,
            "max_rss_mb": died.max_rss_mb,
        }
        if died.signal == signal.SIGKILL and oom_kills:
            how = f"out of memory: {how}"
        if died.max_rss_mb:
            how = f"{how}, peak memory {died.max_rss_mb} MB"
    if handle.lost is not None and (died is None or handle.was_killed):
        how = f"the channel to its executor was lost: {handle.lost}"
    if others:
        how = f"{how}; it ran {others} other jobs at the same time"
    tail = handle.tail.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    lines = tail.splitlines()[-5:]
    more = {"seconds": round(seconds, 3), "oom_kills": oom_kills, "executor": handle.pid}
    if others:
        more["other_jobs"] = others
    return Death(how, detail | more | {"last_lines": lines})


def _how(died: protocol.Died) -> str:
    if died.signal is not None:
        name = str(died.signal)
        with contextlib.suppress(ValueError):
            name = signal.Signals(died.signal).name
        return f"killed by {name}{' (core dumped)' if died.core else ''}"
    if died.code == channel.LOST:
        return f"ended with exit code {died.code}: its channel to the worker was closed in it"
    return f"ended with exit code {died.code}"
