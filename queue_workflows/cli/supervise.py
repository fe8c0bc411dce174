"""Define `queue-workflows supervise`: restart workers of this machine that are flagged dead."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from queue_workflows import config, db, errors
from queue_workflows.cli import command, define
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, entry_point, external_tool, service, signals
from queue_workflows.types import NowFn, Row

TIMEOUT_S = 120.0
"""Seconds for one command; the stop of a systemd unit may take 90 s."""
FIRST_DELAY_S = 10.0
MAX_DELAY_S = 300.0
"""The longest wait after a restart.

It starts at FIRST_DELAY_S and doubles each time. Twice this long without a restart resets it.
"""
STOP_S = 0.8
"""Seconds left for the other parts after the loop is stopped; the command stops within 1 s."""
OUTPUT_BYTES = 4000

_log = logging.getLogger("queue_workflows.supervise")


@define.command(
    "supervise",
    """--bounce QUEUE=COMMAND  What restarts the worker of a queue; repeatable.
    --unit QUEUE=NAME  The systemd unit of a queue's worker; repeatable.
    --every SECONDS 0.1..  The time between two checks.
    --host LABEL  The host label of the workers; default: this machine's.""",
    takes="app debug db log_level log_format",
    reads=False,
)
def supervise(
    bounce: list[str] | None = None, unit: list[str] | None = None, every: float = 5.0,
    host: str | None = None, *, app: str | None, log_level: str, log_format: str | None,
) -> int:  # fmt: skip
    """Restart workers of this machine that are flagged dead."""
    commands = commands_of(bounce or [], unit or [])
    entry_point.setup_logging(log_level, log_format)
    app_loading.load_app(app)
    label = host or config.host_label()
    with signals.StopRequest() as stop, command.database(create=False) as words:
        queues = ", ".join(sorted(commands))
        command.print_message(f"{words}: watching the workers of {label} on {queues}")
        run = functools.partial(run_command, stopped=stop.requested)
        restarter = Restarter(label, commands, run=run)
        task = service.Task("bounce", every, lambda: restarter.restart_due(stop.requested.is_set))
        loop = service.Loop("supervise", [task])
        loop.start()
        stop.requested.wait()
        if loop.stop(STOP_S):
            restarter.close()
    return 0


def commands_of(bounces: list[str], units: list[str]) -> dict[str, list[str]]:
    """Return the command that restarts the worker of each queue, as a list of words.

    Raises `InvalidConfig` for an option without a queue or a command, and for a missing program.
    """
    found: dict[str, list[str]] = {}
    for option, takes, texts in (("--bounce", "COMMAND", bounces), ("--unit", "NAME", units)):
        for text in texts:
            queue, _, value = text.partition("=")
            try:
                words = shlex.split(value)
            except ValueError as error:
                raise errors.InvalidConfig(f"{option} {text!r} cannot be read: {error}") from None
            if option == "--unit" and words:
                if len(words) > 1 or words[0].startswith("-"):
                    no_unit = f"{option} {text!r} names no unit: its name is one word"
                    raise errors.InvalidConfig(no_unit)
                words = ["systemctl", "restart", words[0]]
            if not queue.strip() or not words:
                raise errors.InvalidConfig(f"{option} {text!r} should look like cpu={takes}")
            if queue in found:
                raise errors.InvalidConfig(f"{option} {text!r} is the second one of {queue}")
            if shutil.which(words[0]) is None:
                raise errors.InvalidConfig(f"{option} {text!r} names no command: {words[0]!r}")
            found[queue] = words
    if not found:
        raise errors.InvalidConfig(
            "nothing to restart: name a command per queue by --bounce QUEUE=COMMAND or a systemd "
            "unit by --unit QUEUE=NAME"
        )
    return found


def run_command(
    queue: str, words: list[str], *, stopped: signals.Flag, timeout_s: float = TIMEOUT_S
) -> bool:
    """Run a command and log its output; return whether it ended with exit code 0 in time.

    `stopped` ends it early.
    """
    with tempfile.TemporaryFile() as printed:
        problem = external_tool.PipedCommand(words).run(
            b"", timeout_s=timeout_s, ends_early=stopped.is_set, output=printed.fileno()
        )
        at = max(0, os.fstat(printed.fileno()).st_size - OUTPUT_BYTES)
        text = os.pread(printed.fileno(), OUTPUT_BYTES, at)
    for line in text.decode(errors="replace").splitlines():
        _log.info("%s: | %s", queue, line)
    if problem is not None:
        _log.error("%s: %s: %s", queue, shlex.join(words), problem)
    return problem is None


@dataclass
class _QueueState:
    """The state of one queue: the flag that was handled, and when to act next."""

    handled: object = None
    bounces: int = 0
    last: float = 0.0
    due: float = 0.0


class Restarter:
    """Run a queue's command when its worker here is flagged dead, once per flag.

    A command that fails is tried again. A flag that follows soon has to wait: FIRST_DELAY_S after
    the last restart, doubled each time up to MAX_DELAY_S. A queue that is OFF is left alone.
    """

    def __init__(
        self, host_label: str, commands: dict[str, list[str]], *,
        run: Callable[[str, list[str]], bool], now_fn: NowFn = time.monotonic,
    ) -> None:  # fmt: skip
        self._host = host_label
        self._commands = commands
        self._run = run
        self._now = now_fn
        self._states = {queue: _QueueState() for queue in commands}
        self._unmapped: set[str] = set()
        self._dedicated = db.DedicatedConnection()

    def restart_due(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Handle every due flag; each is read again right before."""
        while not stopped() and (row := self._next()) is not None:
            self._bounce(row)

    def close(self) -> None:
        """Close the connection."""
        self._dedicated.close()

    def _next(self) -> Row | None:
        with self._dedicated.using() as conn:
            rows = statements.workers.flagged(conn, host=self._host)
        now = self._now()
        for row in rows:
            state = self._states.get(row["queue"])
            if state is not None and row["flagged_at"] != state.handled and now >= state.due:
                return row
            queue = row["queue"]
            if state is not None or queue in self._unmapped:
                continue
            self._unmapped.add(queue)
            _log.error(
                "the %s worker of %s is flagged dead, and nothing restarts it: add --bounce %s=... "
                "or --unit %s=...", queue, self._host, queue, queue,
            )  # fmt: skip
        return None

    def _bounce(self, row: Row) -> None:
        queue, state = row["queue"], self._states[row["queue"]]
        _log.warning(
            "the %s worker of %s is flagged dead, last seen %.0f s ago; running %s",
            queue, self._host, row["age_s"], shlex.join(self._commands[queue]),
        )  # fmt: skip
        done = self._run(queue, self._commands[queue])
        now = self._now()
        if now - state.last > 2 * MAX_DELAY_S:
            state.bounces = 0
        state.last, state.due = now, now + min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**state.bounces)
        state.bounces = min(state.bounces + 1, 30)
        if done:
            state.handled = row["flagged_at"]
            _log.info("%s: restarted", queue)
        else:
            _log.warning("%s: trying again in %.0f s at the earliest", queue, state.due - now)
