"""Send alerts of failures to the app's hook and to a command, outside of every transaction."""

from __future__ import annotations

import logging
import threading
import time

from queue_workflows import db
from queue_workflows.alerts import hook_thread, message, settings
from queue_workflows.db import statements
from queue_workflows.engine import failure_alerts
from queue_workflows.runtime import app_loading, piped_command, service
from queue_workflows.types import NowFn

ANNOUNCE_S = 15.0
"""Seconds between two notes that a sender is there."""
LEASE_SPARE_S = 30.0
"""Seconds that a sender has to record what it sent, besides the timeouts of its calls."""
STOP_GRACE_S, STOP_S = 2.0, 3.0
"""How long a call may go on after `stop()`, and how long that waits: it ends within 5 s."""
_log = logging.getLogger(__name__)


class Sender:
    """Sends failures until it is stopped; any number of processes may have one.

    A failure is sent once; twice if the sender dies, or loses the database, between the call and
    the commit of `sent_at`.
    """

    def __init__(self, given: settings.Settings, *, now_fn: NowFn = time.monotonic) -> None:
        self._settings = given
        self._now = now_fn
        self._hook = hook_thread.HookThread(given.hooks_of) if given.has_hook else None
        self._command = piped_command.PipedCommand(given.command) if given.command else None
        self._loop = service.Loop(
            "failure alerts", [service.Task("send", given.poll_s, self.run_once)]
        )
        self._announced: float | None = None
        self._sent: list[str] = []
        """Tokens of calls that were made and are not recorded yet."""
        self._stopping = threading.Event()
        self._ends_at = float("inf")

    def start(self) -> None:
        """Start its thread, which looks for failures every ALERT_POLL_S."""
        whom = ["the app's functions"] if self._hook else []
        whom += [self._settings.command[0]] if self._command else []
        _log.info(
            "failures are sent to %s, in at most %d calls a minute",
            " and ".join(whom), self._settings.per_minute,
        )  # fmt: skip
        self._loop.start()

    def stop(self) -> None:
        """Stop soon. A hook that hangs is left behind, on a thread that keeps no process alive."""
        self._ends_at = min(self._ends_at, self._now() + STOP_GRACE_S)
        self._stopping.set()
        self._loop.stop(STOP_S)
        if self._hook is not None:
            self._hook.stop()

    def __enter__(self) -> Sender:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run_once(self) -> int:
        """Send what waits, within the limit of all senders; return how many calls were made."""
        calls = 0
        while not self._stopping.is_set():
            self._note()
            if not self._can_send():
                break
            taken = self._take()
            if taken is None:
                break
            if self._send(message.of(taken)):
                calls += 1
                self._sent.append(taken.token)
        self._note()
        return calls

    def _can_send(self) -> bool:
        return self._command is not None or (self._hook is not None and self._hook.is_free())

    def _take(self) -> failure_alerts.Taken | None:
        now = self._now()
        due = self._announced is None or now - self._announced >= ANNOUNCE_S
        with db.transaction() as conn:
            if due:
                statements.failure_alerts.announce(conn, keep_s=self._settings.max_age_s)
            taken = failure_alerts.take(
                conn,
                app=app_loading.app_name(),
                per_minute=self._settings.per_minute,
                lease_s=2 * self._settings.timeout_s + LEASE_SPARE_S,
                max_age_s=self._settings.max_age_s,
            )
        if due:
            self._announced = now
        return taken

    def _note(self) -> None:
        while self._sent:
            with db.transaction() as conn:
                statements.failure_alerts.sent(conn, token=self._sent[0])
            self._sent.pop(0)

    def _send(self, alert: dict[str, object]) -> bool:
        """Make the calls of one alert; return whether none was cut short by `stop()`."""
        text, limit_s = message.encoded(alert), self._settings.timeout_s
        problems: list[str | None] = []
        if self._hook is not None and self._hook.is_free():
            problems.append(self._hook.call(alert, timeout_s=limit_s, ends_early=self._is_over))
        if self._command is not None:
            problems.append(self._command.run(text, timeout_s=limit_s, ends_early=self._is_over))
        for problem in filter(None, problems):
            _log.warning("failure alert: %s; it was for: %s", problem, alert["text"])
        return not (self._is_over() and any(problems))

    def _is_over(self) -> bool:
        return self._stopping.is_set() and self._now() >= self._ends_at
