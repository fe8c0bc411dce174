"""Child processes that are restarted when they exit, and die with the process that started them."""

from __future__ import annotations

import logging
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from queue_workflows import config, errors
from queue_workflows.runtime import child, process, signals
from queue_workflows.types import NowFn

GIVE_UP_AFTER = 3
FIRST_DELAY_S = 0.2
HEALTHY_AFTER_S = 30.0
STOP_MARGIN_S = 4.0
"""What a child gets beyond SHUTDOWN_TIMEOUT_S, to hand its job back and exit."""
KILL_WAIT_S = 5.0
POLL_S = 0.1

WATCH_S = 0.5
"""How often a `watch` is asked about a child."""

T = TypeVar("T")
SpawnFn: TypeAlias = Callable[..., child.Child]
"""Called as `child.Child`; without the descriptors when there are none."""

logger = logging.getLogger(__name__)


class ChildSpec(NamedTuple):
    """A child to keep running; `env` is added to this process's own environment.

    Of this process's descriptors it inherits `fds`.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    fds: Sequence[int] = ()


class Verdict(NamedTuple):
    """A child has to be killed: the exit code that then counts as its own, and why."""

    code: int
    reason: str
    more: Any = None
    """For `on_exit`; nothing here looks at it."""


class Exit(NamedTuple):
    """How a child ended: an exit code, or the signal that killed it, or neither if unknown.

    One that was killed by a `verdict` has that code and no signal. `max_rss_mb` is its largest
    resident size, never below that of the supervisor, whose image it is until exec.
    """

    name: str
    pid: int
    code: int | None
    signal: int | None
    max_rss_mb: int
    seconds: float
    verdict: Verdict | None = None


class ChildStatus(NamedTuple):
    """`state` is running, waiting (for its restart), gave_up or stopped; `pid` while it runs."""

    pid: int | None
    state: str
    restarts: int


class RestartRule:
    """How long to wait before a restart: 0.2 s, doubled by each quick exit in a row, capped.

    A child that lived `HEALTHY_AFTER_S` starts the row anew.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._quick = 0
        self._refused = 0

    def after_exit(self, code: int | None, seconds: float) -> float | None:
        """Seconds until the restart; None after `GIVE_UP_AFTER` quick usage errors in a row."""
        if seconds >= HEALTHY_AFTER_S:
            self._quick = self._refused = 0
        else:
            self._refused = self._refused + 1 if code == process.USAGE_ERROR else 0
        if self._refused >= GIVE_UP_AFTER:
            return None
        delay_s = FIRST_DELAY_S * 2.0 ** min(self._quick, 30)
        self._quick += 1
        return min(delay_s, self._max_delay_s)


class Supervisor:
    """Keeps a fixed set of child processes running, each in a session of its own.

    A Ctrl-C reaches the supervisor only. `start`, `run` and `stop` belong to one thread that lives
    as long as the children: on Linux they get SIGTERM when it ends. `children` is for any thread.
    `on_exit` runs right after the child was reaped. `watch(name, pid, due)` is asked every WATCH_S
    about each that runs: a `Verdict` kills it. `due`: it was told to stop, and has had its time.
    While either runs nothing else is supervised.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        on_exit: Callable[[Exit], object] | None = None,
        watch: Callable[[str, int, bool], Verdict | None] | None = None,
        fail_fast: bool = False,
        backoff_max_s: float | None = None,
        now_fn: NowFn = time.monotonic,
        spawn: SpawnFn = child.Child,
    ) -> None:
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise errors.InvalidConfig(
                f"children to supervise need names of their own, at least one: {names}"
            )
        if backoff_max_s is None:
            backoff_max_s = config.SUPERVISOR_BACKOFF_MAX_S.read()
        self._seats = [_Seat(spec, RestartRule(backoff_max_s), spawn, now_fn) for spec in specs]
        self._on_exit = on_exit
        self._watch = watch
        self._tick_s = signals.RECHECK_S if watch is None else WATCH_S
        self._fail_fast = fail_fast
        self._now = now_fn

    def children(self) -> dict[str, ChildStatus]:
        """Every child by name, as it is now."""
        return {seat.spec.name: seat.status() for seat in self._seats}

    @property
    def gave_up(self) -> tuple[str, ...]:
        """The children that refused to start with exit code 2 too often, by name."""
        return tuple(seat.spec.name for seat in self._seats if seat.state == "gave_up")

    def start(self) -> None:
        """Start each child that is due, which at first is all."""
        for seat in self._seats:
            if seat.state == "waiting" and self._now() >= seat.due:
                seat.start()

    def run(self, stop: signals.StopRequest, *, deadline_s: float | None = None) -> int:
        """Supervise until asked to stop, then stop all; 0, or 2 when it ends by giving up.

        It ends by giving up when every child has been given up, with `fail_fast` when one has.
        """
        try:
            while not stop.requested.is_set():
                self.start()
                if len(self.gave_up) >= (1 if self._fail_fast else len(self._seats)):
                    return process.USAGE_ERROR
                due = [seat.due for seat in self._seats if seat.state == "waiting"]
                pause_s = max(0.0, min(due) - self._now()) if due else self._tick_s
                self._wait(min(pause_s, self._tick_s), stop.requested)
                self._look(due=False)
                self._reap()
            return 0
        finally:
            self.stop(deadline_s, stop)

    def stop(
        self, deadline_s: float | None = None, again: signals.StopRequest | None = None
    ) -> bool:
        """SIGTERM to all, SIGKILL to what is left after the deadline; whether all are reaped.

        None: SHUTDOWN_TIMEOUT_S and a margin. Each further request in `again` sends SIGTERM again,
        and ends the children's time. That SIGKILL counts as exit code 0, by a verdict.
        """
        if deadline_s is None:
            deadline_s = config.SHUTDOWN_TIMEOUT_S.read() + STOP_MARGIN_S
        for seat in self._seats:
            seat.retire()
        self._send(signal.SIGTERM)
        seen = min(1, again.count) if again else 0
        deadline = self._now() + deadline_s
        due = deadline - STOP_MARGIN_S
        while self._running() and self._now() < deadline:
            self._wait(min(POLL_S, max(0.0, deadline - self._now())))
            self._reap()
            if again and again.count > seen:
                seen, due = again.count, self._now()
                self._send(signal.SIGTERM)
            self._look(due=self._now() >= due)
        for seat, _ in self._running():
            logger.warning("%s did not stop within %.1f s: killed", seat.spec.name, deadline_s)
            seat.verdict = seat.verdict or Verdict(0, f"did not stop within {deadline_s:.1f} s")
        self._send(signal.SIGKILL)
        deadline = self._now() + KILL_WAIT_S
        while self._running() and self._now() < deadline:
            self._wait(POLL_S)
            self._reap()
        return not self._running()

    def _running(self) -> list[tuple[_Seat, child.Child]]:
        return [(seat, seat.child) for seat in self._seats if seat.child is not None]

    def _send(self, signum: signal.Signals) -> None:
        for _, running in self._running():
            running.send(signum)

    def _wait(self, timeout_s: float, wake: signals.Flag | None = None) -> None:
        """Until a child exits, `wake` is set or the time is over, whichever is first."""
        poll = select.poll()
        if wake is not None:
            poll.register(wake, select.POLLIN)
        for _, running in self._running():
            if running.pidfd is not None:
                poll.register(running.pidfd, select.POLLIN)
            else:
                timeout_s = min(timeout_s, POLL_S)
        poll.poll(timeout_s * 1000)

    def _look(self, *, due: bool) -> None:
        for seat, running in self._running():
            if self._watch is None or seat.verdict is not None:
                continue
            seat.verdict = self._guard(
                "while watching", seat, self._watch, seat.spec.name, running.pid, due
            )
            if seat.verdict is not None:
                running.send(signal.SIGKILL)

    def _reap(self) -> None:
        for seat, _ in self._running():
            ended = seat.reap()
            if ended is not None and self._on_exit is not None:
                self._guard("after the exit of", seat, self._on_exit, ended)

    def _guard(self, when: str, seat: _Seat, call: Callable[..., T], *given: object) -> T | None:
        try:
            return call(*given)
        except Exception:
            logger.exception("%s %s", when, seat.spec.name)
            return None


class _Seat:
    """A spec and its child: the process while it runs, when it is due while it waits."""

    def __init__(self, spec: ChildSpec, rule: RestartRule, spawn: SpawnFn, now_fn: NowFn) -> None:
        self.spec = spec
        self.state = "waiting"
        self.due = now_fn()
        self.child: child.Child | None = None
        self.verdict: Verdict | None = None
        """By which it is being killed."""
        self._rule = rule
        self._spawn = spawn
        self._now = now_fn
        self._starts = 0
        self._started_at = 0.0

    def status(self) -> ChildStatus:
        running = self.child
        return ChildStatus(running and running.pid, self.state, max(0, self._starts - 1))

    def start(self) -> None:
        self._starts += 1
        self._started_at = self._now()
        try:
            fds = [self.spec.fds] if self.spec.fds else []
            self.child = self._spawn(self.spec.argv, self.spec.env, *fds)
        except OSError as error:
            never = isinstance(error, FileNotFoundError | PermissionError)
            code = process.USAGE_ERROR if never else None
            self._after_end(code, 0.0, f"could not be started: {error}")
            return
        self.state = "running"
        logger.info("%s: started, pid %d", self.spec.name, self.child.pid)

    def retire(self) -> None:
        """From now on it is not started again."""
        if self.state != "gave_up":
            self.state = "stopped"

    def reap(self) -> Exit | None:
        """How its child ended, which decides on the restart; None while it runs."""
        death = self.child.reap() if self.child else None
        if self.child is None or death is None:
            return None
        how = f"signal {death.signal}" if death.signal else f"exit code {death.code}"
        verdict, self.verdict = self.verdict, None
        if verdict is not None and death.signal == signal.SIGKILL:
            death = death._replace(code=verdict.code, signal=None)
            how = f"a kill that counts as exit code {verdict.code} ({verdict.reason})"
        else:
            verdict = None  # it went by itself, just before
        seconds = self._now() - self._started_at
        ended = Exit(self.spec.name, self.child.pid, *death, seconds=seconds, verdict=verdict)
        self.child = None
        what = f"pid {ended.pid} ended after {ended.seconds:.1f} s with {how}"
        self._after_end(death.code, ended.seconds, what)
        return ended

    def _after_end(self, code: int | None, seconds: float, what: str) -> None:
        if self.state == "stopped":
            logger.info("%s: %s", self.spec.name, what)
            return
        delay_s = self._rule.after_exit(code, seconds)
        if delay_s is None:
            self.state = "gave_up"
            logger.error(
                "%s: %s; given up after %d refusals to start, its own message says why: %s",
                self.spec.name, what, GIVE_UP_AFTER, " ".join(self.spec.argv),
            )  # fmt: skip
            return
        self.state = "waiting"
        self.due = self._now() + delay_s
        logger.warning("%s: %s; restart in %.1f s", self.spec.name, what, delay_s)
