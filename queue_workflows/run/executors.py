"""Fork the executors of one queue, give them jobs, and read their messages and output.

Only the thread of the worker's loop calls this, and no call blocks. It tells the owner about its
jobs. It is long, as room, forks, messages, output and ends all change the state of an executor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, Final

from queue_workflows.claim import outcomes
from queue_workflows.run import job_output, launcher, wire
from queue_workflows.run.executor import UNKNOWN, Death, Executor
from queue_workflows.runtime import clock, io_loop, log_context, logs
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
DEPTH: Final = 8
"""How many short jobs an executor has at most, one running and the others waiting."""
END_S: Final = 5.0
"""Least seconds that an executor has to end after it was asked to."""
LOST_S: Final = 1.0
"""Seconds that a process gets to end after its channel was closed."""
UNREAD: Final = "its executor ended before it read this job"
UNSTARTED: Final = "its executor could not start"
UNFORKED: Final = "no executor could be forked"
FORK_REFUSED: Final = (
    "no executor can be forked for now: %s. It is tried again; if it lasts, raise the limits of "
    "processes, open files or memory of this account"
)
FORK_FIRST_S: Final = 0.1
FORK_AGAIN_S: Final = 5.0
"""Pauses in seconds before the next fork, after one failed or an executor died without a job."""
LET_GO_S: Final = 60.0
"""Seconds after which an idle executor is asked to end, unless it has a GPU."""
NO_MODEL: Final[JsonDict] = {
    "current": None, "loading": None, "load_s": 0.0, "held_s": 0.0, "vram_gb": 0.0,
}  # fmt: skip


class Executors:
    """The executors of one queue; an ended one is replaced.

    `owner` is a `worker.desk.Desk`; its methods are called about jobs, which are
    `worker.claimed_job.ClaimedJob`. `slots` jobs run at once, each in an executor of its own, but
    jobs started as `shared` share one. With `lone`, an executor is forked only after the last has
    ended, as two may not fit into the memory of a GPU. After a request to end, an executor has
    `end_s` seconds for its threads and exit functions. An executor is replaced after `max_jobs`
    jobs, or if it is larger than `max_rss_mb` after a job; None means never.
    """

    def __init__(
        self,
        loop: io_loop.IoLoop,
        launcher_: launcher.Launcher | None,
        printer: job_output.Printer,
        owner: Any,
        *,
        slots: int,
        shared: bool = False,
        lone: bool = False,
        end_s: float = 0.0,
        max_jobs: int | None = None,
        max_rss_mb: float | None = None,
    ) -> None:
        self._loop = loop
        self._launcher = launcher_
        self._printer = printer
        self._owner = owner
        self._max_jobs, self._max_rss_mb = max_jobs, max_rss_mb
        self._slots, self._shared, self._lone = slots, shared, lone
        self._by_number: dict[int, Executor] = {}
        self._by_pid: dict[int, Executor] = {}
        self._end_s = max(END_S, end_s)
        self._fork_at = 0.0 if lone else math.inf
        """When to fork, or may try a fork again; inf means whenever a job needs an executor."""
        self._fork_s = FORK_FIRST_S
        self.closing = False
        self._depth = 1 if shared or lone or slots > 1 else DEPTH
        """The most jobs of an executor if `queues`. It is 1 with several slots, as a job could wait
        behind a long one while another executor is free."""
        self.queues = False
        """Whether the next job may wait in an executor behind other short jobs."""

    def __iter__(self) -> Iterator[Executor]:
        return iter([*self._by_number.values()])

    # --- Room for jobs.

    @property
    def room(self) -> int:
        """Return how many jobs can start now, or wait in executors if that is allowed."""
        every = self._by_number.values()
        may_fork = self._fork_at == math.inf or clock.boot_s() >= self._fork_at
        if self._shared:
            # An executor that gets no further job runs beside its successor until its jobs end.
            return max(0, self._slots - sum(len(each.jobs) for each in every)) if may_fork else 0
        forks = may_fork and not (self._lone and self._by_number)
        free = max(0, self._slots - len(self._lasting())) if forks else 0
        for each in every:
            if each.usable:
                free += not each.jobs or (self.queues and self._may_wait_in(each))
        return free

    def _may_wait_in(self, place: Executor) -> bool:
        """Return whether a job may wait in an executor until the jobs before it have ended."""
        return place.usable and place.queues and 0 < len(place.jobs) < self._depth

    def _lasting(self) -> list[Executor]:
        """Return the executors that count as slots, which is all that do not end soon."""
        return [each for each in self._by_number.values() if each.jobs or not each.ends]

    @property
    def accepts(self) -> bool:
        """Return whether jobs may be claimed for it."""
        return True

    def recorded(self, job: Any, found: object) -> None:
        """Note that the outcome of a job is recorded; `found` is its row unless handed back."""

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        """Give a job to an executor; `room` must be positive.

        An `isolated` job gets a new executor, any other `shared` one the executor for async jobs.
        """
        wanted = shared and not isolated
        place = next(
            (
                each
                for each in self._by_number.values()
                if each.usable
                and each.shared == wanted
                and (wanted or not each.jobs)
                and not (isolated and each.count)
            ),
            None,
        )
        if place is None and self.queues and len(self._lasting()) >= self._slots:
            place = next(filter(self._may_wait_in, self._by_number.values()), None)
        if place is None:
            if isolated and not self._shared and (idle := self._idle()):
                self.let_go(idle[0])  # it has had jobs
            place = self._fork(shared=wanted)
        if place is None:
            self._return(job, UNFORKED)
            return
        # The time until the executor is ready counts too, since loading the app may never end.
        waits = bool(place.jobs and not place.shared)
        place.queues = self.queues
        place.count += 1
        if isolated or (self._max_jobs is not None and place.count >= self._max_jobs):
            place.full = True
        job.key, job.place = place.count, place
        place.jobs[job.key] = job
        if waits:
            job.wait()
        kind = wire.RUN_NODE if job.in_run else wire.RUN_TASK
        self._send(place, wire.frame(kind, job.key, job.body))
        job.body = b""

    def _return(self, job: Any, why: str) -> None:
        """Report a job that no executor can run, so that it is handed back uncounted."""
        self._owner.died(job, Death("", {}, False, why))

    def _idle(self) -> list[Executor]:
        return [each for each in self if each.usable and not each.jobs]

    # --- Requests to executors.

    def interrupt(self, job: Any, reason: str) -> None:
        """Ask the handler of a job to end; only the reason `cancelled` sets its cancel event."""
        place = job.place
        if place is None:
            return
        # An executor reads 4096 bytes. There, an empty reason means that the job has begun.
        reason = reason[:1000] or "it must end"
        if place.shared:
            self._send(place, wire.frame(wire.INTERRUPT, job.key, reason.encode()))
            return
        with contextlib.suppress(OSError):  # it has ended, or has not read earlier requests
            place.requests.send(f"{job.key} {reason}".encode())

    def kill(self, place: Executor, signum: int, why: str) -> None:
        """Send a signal to an executor and its children, each signal once."""
        if place.packet is None and signum not in place.signals:
            place.signals.add(signum)
            place.unsent_signals.append(signum)
            place.killed_for = place.killed_for or why
            self._send_signals(place)

    def _send_signals(self, place: Executor) -> None:
        """Send the signals of an executor that has a pid; `tick` repeats it if that fails."""
        assert self._launcher is not None
        while place.pid and place.unsent_signals:
            if not self._launcher.kill(place.pid, place.unsent_signals[0]):
                self._loop.wake_at(clock.boot_s() + LOST_S)
                break
            del place.unsent_signals[0]

    def let_go(self, place: Executor) -> None:
        """Ask an executor to end after its present jobs."""
        if place.let_go_at == math.inf:
            place.full, place.let_go_at = True, clock.boot_s()
            self._send(place, wire.frame(wire.QUIT, 0, b""))

    def answer(self, place: Executor, number: int, answer: JsonDict) -> None:
        """Answer a question of a handler in this executor with `value`, `error` and `is_final`.

        `is_final` means that another attempt would not help. The job may have ended, since a thread
        of its handler may still wait.
        """
        if place.packet is None and number:
            if len(body := wire.encoded(answer)) > wire.MAX_BYTES:
                why = f"the answer has {len(body)} bytes as JSON, more than {wire.MAX_BYTES}"
                body = wire.encoded({"value": None, "error": why, "is_final": True})
            self._send(place, wire.frame(wire.ANSWER, number, body))

    def expect_announcement(self, place: Executor) -> None:
        """Give an executor no job until `announce`, since it keeps a value for the app's hook."""
        place.announcing += 1

    def announce(self, place: Executor, key: int, rows: bytes | None) -> None:
        """Have the app's hook called for a recorded job; without `rows`, only drop its value."""
        if place.packet is None:
            body = b"" if rows is None or len(rows) > wire.MAX_BYTES else rows
            self._send(place, wire.frame(wire.ANNOUNCE, key, body))

    def change_model(self, change: JsonDict) -> bool:
        """Let an idle executor load or unload a model; return False if none is idle."""
        idle = self._idle()[:1]
        for place in idle:
            place.changing = True
            self._send(place, wire.frame(wire.LOAD, 0, wire.encoded(change)))
        return bool(idle)

    def kill_idle(self, why: str) -> None:
        """Kill the executors that have no job."""
        for place in self:
            if not place.jobs:
                self.kill(place, signal.SIGKILL, why)

    def shed(self) -> None:
        """End the idle executors that keep memory of their jobs, since memory is full."""
        for place in self:
            if place.has_grown():
                text = "an executor that keeps %.0f MB of its jobs is replaced: memory is full"
                _log.info(text, place.memory_mb() - place.mb_before)
                self.let_go(place)

    @property
    def gives_back(self) -> bool:
        """Return whether idle executors keep memory that `shed` frees."""
        return any(each.let_go_at < math.inf or each.has_grown() for each in self)

    def tick(self, now: float) -> float:
        """Kill overdue executors and fork missing ones; return when to call this again."""
        due = math.inf
        for place in self:
            if place.unsent_signals:
                self._send_signals(place)
            ends_at = math.inf if place.jobs else place.let_go_at + self._end_s
            if now >= (at := min(place.lost_at + LOST_S, ends_at)):
                self.kill(place, signal.SIGKILL, place.killed_for)
                continue
            if at == math.inf and not (self._lone or place.jobs or place.announcing):
                at = place.idle_since + LET_GO_S
                if now >= at:
                    self.let_go(place)
            due = min(due, max(at, now + LOST_S))
        if now >= self._fork_at and not self.closing:
            self._fork_at = math.inf
            if self._lone and not self._by_number:
                self._fork(shared=False)
            self._owner.room()
        return min(due, self._fork_at)

    # --- Forks.

    def _fork(self, *, shared: bool) -> Executor | None:
        """Ask the launcher for an executor; return None if it cannot be asked now.

        For example, this process may have no descriptors left.
        """
        assert self._launcher is not None, "there are no executors to fork"
        opened: list[int] = []
        try:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
                opened += (each.detach() for each in socket.socketpair(socket.AF_UNIX, kind))
            for _ in range(2):
                opened += os.pipe()
            number = self._launcher.fork(opened[1::2], shared=shared)
        except OSError as error:
            _log.warning(FORK_REFUSED, error)
            for fd in opened:
                os.close(fd)
            self._pause()
            return None
        channel, requests, *pipes = opened[::2]
        for fd in opened[1::2]:
            os.close(fd)
        ends = socket.socket(fileno=channel), socket.socket(fileno=requests)
        place = Executor(number, ends, (pipes[0], pipes[1]), shared=shared)
        place.lines = logs.Pipes(lambda: place.pid) if logs.are_json() else None
        self._by_number[place.number] = place
        return place

    def _pause(self) -> None:
        """Delay the next fork; each further failure doubles the delay."""
        self._fork_at = clock.boot_s() + self._fork_s
        self._fork_s = min(FORK_AGAIN_S, self._fork_s * 2)
        self._loop.wake_at(self._fork_at)

    def forked(self, packet: dict[str, Any]) -> int:
        """Note the launcher's reply about a fork; return the executor's pid, or 0 if it failed."""
        place = self._by_number.get(packet["forked"])
        if place is None:
            return 0
        if packet["error"] is not None:
            _log.warning(FORK_REFUSED, packet["error"])
            self._end(place, UNKNOWN, f"{UNFORKED}: {packet['error']}")
            return 0
        assert self._launcher is not None
        place.pid = packet["pid"]
        place.mb_before = place.memory_mb()
        self._by_pid[place.pid] = place
        # Read its output only now, since printed lines show the pid.
        self._loop.read(place.channel.fileno(), functools.partial(self._receive, place))
        for fd in place.out.fds:
            self._loop.read(fd, functools.partial(self._on_output, place))
        if place.unsent_signals:
            self._send_signals(place)
        return place.pid

    # --- Traffic.

    def _send(self, place: Executor, data: bytes) -> None:
        if place.unsent:
            place.unsent += data
        elif not place.lost and (sent := self._write(place, data)) < len(data):
            place.unsent += data[sent:]
            self._loop.write(place.channel.fileno(), lambda: self._flush(place))

    def _flush(self, place: Executor) -> None:
        del place.unsent[: self._write(place, place.unsent)]
        if not place.unsent:
            self._loop.write(place.channel.fileno(), None)

    def _write(self, place: Executor, data: bytes | bytearray) -> int:
        """Return how many bytes were sent; all of them if the executor has closed its end."""
        try:
            return place.channel.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # messages that it sent before its end are still to be read

    def _lose(self, place: Executor, why: object) -> None:
        if not place.lost:
            place.lost, place.lost_at = str(why), clock.boot_s()
            self._loop.forget(place.channel.fileno())
            self._loop.wake_at(place.lost_at + LOST_S)

    def _receive(self, place: Executor) -> bool:
        """Read once from an executor; return whether there may be more."""
        try:
            if not (data := place.channel.recv(wire.SIZE)):
                raise ConnectionError("it has closed its channel, or has ended")
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(place, error)
            return False
        try:
            for kind, key, body in place.frames.add(data):
                self._take(place, kind, key, body)
        except (wire.ProtocolError, ValueError, LookupError, TypeError) as error:
            self._lose(place, error)
            return False
        return True

    def _take(self, place: Executor, kind: int, key: int, body: bytes) -> None:
        if kind == wire.COMPLETED:
            self._on_outcome(place, key, wire.completed_of(body))
        elif kind == wire.ENDED:
            self._on_outcome(place, key, wire.ended_of(body))
        elif kind == wire.PRINTED:
            # Its output belongs to the job whose outcome follows.
            place.drains += 1
            self._drain(place, job_output.HELD_BYTES)
            self._send(place, wire.frame(wire.DRAINED, key, b""))
        elif kind == wire.LOG:
            self._on_log(place, key, wire.checked(kind, body))
        elif kind in wire.OF_EXECUTOR:
            self._on_state(place, kind, body)
        elif (job := place.jobs.get(key)) is not None:
            self._on_report(job, kind, body)

    def _on_state(self, place: Executor, kind: int, body: bytes) -> None:
        if kind == wire.MODEL:
            self._owner.model(wire.checked(kind, body))
        elif kind == wire.READY:
            self._on_ready(place, wire.checked(kind, body)["text"])
        elif kind == wire.LEAVES:
            self._on_leave(place, body.decode())
        elif kind == wire.ANNOUNCED:
            place.announcing -= 1
            self._freed(place)
        else:
            error = wire.decoded(body)
            place.changing = False
            self._owner.changed(None if error is None else str(error))
            self._freed(place)

    def _on_report(self, job: Any, kind: int, body: bytes) -> None:
        if kind == wire.PROGRESS:
            job.beat(clock.boot_s(), body.decode() or None)
            if body:
                self._loop.wake_at(0.0)  # so that the progress is stored
        elif kind == wire.CURSOR:
            name, key, position = wire.checked(kind, body)
            job.cursors[name, key] = position
            job.beat(clock.boot_s())
        elif kind == wire.ASK:
            self._owner.asked(job, wire.checked(kind, body))
        elif kind == wire.EVENT:
            self._owner.event(job, *wire.checked(kind, body))
        elif kind == wire.WAITS:
            self._owner.waits(job)
        elif kind == wire.STARTED:
            self._owner.started(job)
        else:
            raise wire.ProtocolError(f"an unknown kind of message: {kind}")

    def _on_ready(self, place: Executor, error: str) -> None:
        if error:
            place.killed_for = f"{UNSTARTED}: {error}"
            _log.error("an executor could not start, and ends: %s", error)
            return
        place.ready = True
        for job in [*place.jobs.values()][: None if place.shared else 1]:
            self._owner.started(job)

    def _on_outcome(self, place: Executor, key: int, outcome: outcomes.Outcome) -> None:
        if not place.shared and key == next(iter(place.jobs), None):  # else it waits behind another
            self._print(place, 0, None)
        job = place.jobs.pop(key, None)
        if job is None:
            return
        if not place.jobs:
            place.idle_since = clock.boot_s()
        self._owner.ended(job, outcome)
        if place.ready and place.jobs and not (place.shared or place.job.has_started):
            self._owner.started(place.job)
        self._freed(place)

    def _on_leave(self, place: Executor, why: str) -> None:
        """Replace an executor that asks for it, and hand back the jobs that it will not run."""
        place.full = True
        jobs = [] if place.shared else [*place.jobs.values()]
        for job in jobs:
            del place.jobs[job.key]
            self._return(job, f"an earlier job has left a state in its executor: {why}")
        self._freed(place)

    def _freed(self, place: Executor) -> None:
        """End an executor that has reached a limit, else let it take another job."""
        if place.signals and not place.jobs:
            self.kill(place, signal.SIGKILL, place.killed_for)  # SIGTERM has not ended it
            return
        if self._max_rss_mb is not None and place.memory_mb(b"VmRSS") > self._max_rss_mb:
            place.full = True
        if place.full and not place.announcing and (place.shared or not place.jobs):
            self.let_go(place)
        self._owner.room()

    # --- Output.

    def _on_log(self, place: Executor, key: int, record: JsonDict) -> None:
        job = place.jobs.get(key)
        # The engine's own records are for the worker's log only.
        if job is not None and record["name"].partition(".")[0] != job_output.ENGINE:
            if not place.shared and (len(place.jobs) == 1 or record.get("is_behind_output")):
                # Read the output before this record first. It can only be this job's.
                self._drain(place)
            text = f"{record['text']}\n".encode("utf-8", "backslashreplace")
            self._owner.printed(job, text)
        with log_context.bound({} if job is None else job.ids):
            self._printer.record(place.pid, record)

    def _on_output(self, place: Executor) -> None:
        """Read an executor's output and add it to the log of the job that runs.

        If other jobs wait there, read its messages first, since the next job may already run. While
        its pipes hold output, it begins no other job.
        """
        if place.shared or len(place.jobs) < 2:
            self._drain(place)
        elif place.out.ready():
            drains = place.drains
            if self._receive(place):
                self._receive(place)  # a socket holds less than two reads
            if place.drains == drains:
                self._drain(place, 1)

    def _drain(self, place: Executor, limit: int = job_output.DRAIN_BYTES) -> None:
        """Read the pipes of an executor, print the output and add it to the job's log."""
        for number, data in place.out.drain(limit, closing=self._loop.forget):
            if not place.shared and place.jobs:
                self._owner.printed(place.job, data)
            self._print(place, number, data)

    def _print(self, place: Executor, number: int, data: bytes | None) -> None:
        """Print the output of an executor; None ends the last line of each stream."""
        if place.lines is None:
            if data:
                self._printer.write(number, data)
            return
        with log_context.bound({} if place.shared or not place.jobs else place.job.ids):
            if data is not None:
                self._printer.write(number, place.lines.add(number, data))
            else:
                for each in (1, 2):
                    self._printer.write(each, place.lines.end(each))

    def catch_up(self) -> None:
        """Read all that was sent, so that each job whose handler has begun is known as such."""
        for place in self:
            self._read_rest(place)

    # --- Ends.

    def died(self, packet: dict[str, Any]) -> None:
        """End the jobs of an executor that has ended, if it belongs to this queue."""
        place = self._by_pid.pop(packet["died"], None)
        if place is not None:
            place.packet = packet  # so it gets no other job
            self._read_rest(place)
            self._end(place, packet, "")

    def _read_rest(self, place: Executor) -> None:
        """Read all that an executor has sent, such as the outcome of a job as it ended."""
        while not place.lost and self._receive(place):
            continue

    def _end(self, place: Executor, packet: dict[str, Any], refused: str) -> None:
        """End the jobs of an executor; `refused` is why they go back uncounted, or empty."""
        place.packet = packet
        self._drain(place, job_output.HELD_BYTES)
        self._print(place, 0, None)
        self._forget(place)
        jobs, place.jobs = [*place.jobs.values()], {}
        del self._by_number[place.number]
        last = math.inf if packet["begun"] is None else packet["begun"]
        begun = [job for job in jobs if job.key <= last]
        is_early = not (begun or place.full or place.signals)
        failed = refused or not (place.ready or place.signals)
        if failed or is_early:
            self._pause()
        elif self._lone:
            self._fork_at = 0.0
        if is_early and not refused:
            _log.warning("an idle executor %s", place.death(packet, 0).evidence)
        if begun and not failed:
            self._fork_s = FORK_FIRST_S
        if self._lone:
            self._end_model(place)
        ran = packet.get("ran", sum(job.has_started for job in begun))
        death = place.death(packet, max(0, ran - 1))
        for job in jobs:
            job.place = None
            why = place.killed_for or refused
            if not why and job.has_started and (job.key > last or not place.ready):
                why = UNREAD if place.ready else UNSTARTED
            self._owner.died(job, death._replace(killed_for=why))
        place.close()
        if not self.closing:
            self._owner.room()

    def _end_model(self, place: Executor) -> None:
        """Report that the executor of a GPU, and so its model, is gone."""
        if place.changing:
            self._owner.changed(place.killed_for or "its executor has ended")
        self._owner.model(NO_MODEL)

    def _forget(self, place: Executor) -> None:
        for fd in (place.channel.fileno(), *place.out.fds):
            self._loop.forget(fd)

    def lose(self, error: launcher.LauncherLost) -> None:
        """End the jobs of all executors, which died with their launcher."""
        self.closing = True
        self.catch_up()
        # An executor is ready before it reads a job.
        ran = sum(job.has_started for each in self if each.ready for job in each.jobs.values())
        for place in self:
            self._by_pid.pop(place.pid, None)
            packet = UNKNOWN | {"by_deadline": error.by_deadline, "launcher": error.signum}
            refused = "" if error.signum else "the launcher of its executor has ended"
            self._end(place, packet | {"ran": ran}, refused)

    def close(self) -> None:
        """Close the descriptors of all."""
        for place in self:
            self._forget(place)
            place.close()
        self._by_number.clear()
