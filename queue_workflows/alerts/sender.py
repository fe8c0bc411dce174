"""Send alerts of failures to the app's hook and to a command, outside of every transaction.

Triggers write the rows of failures. Each sender claims rows; one rate limit holds for all senders.
"""

from __future__ import annotations

import json
import logging
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from queue_workflows import config, db, errors
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, display, external_tool, masking, service
from queue_workflows.types import FailureHook, JsonDict, Row

PER_MINUTE = 10
"""Most calls of all schedulers within a minute. The last one sums up the other failures, so that an
outage does not flood people."""
TIMEOUT_S = 10.0
"""Seconds that the failure hook, and the command, may take. The next alert waits for them."""
MAX_AGE_S = 3600.0
"""A failure of this age in seconds is not sent any more, for instance after a long outage."""
POLL_S = 5.0
"""Seconds between two polls for failures to send."""
ANNOUNCE_S = 15.0
"""Seconds between two records that a sender is running."""
LEASE_SPARE_S = 30.0
"""Seconds that a sender has to record its calls, besides the timeouts of its calls."""
STOP_GRACE_S, STOP_S = 2.0, 3.0
"""How long a call may go on after `stop()`, and how long that waits: it ends within 5 s."""
STEP_S = 0.1
"""Seconds between two checks whether the caller of a hook has to stop."""
TRIES = 2
"""How often a failure is claimed: a second time if a sender died during the call."""
PATIENCE_S = 60.0
"""Seconds for which a failure is left to senders of the app whose code has a function for it."""
ERROR_LIMIT = 2000
TEXT_LIMIT = 600
_FAILED = {"failed": "failed", "cannot_fire": "cannot fire", "missed": "missed an instant"}

Taken: TypeAlias = "tuple[str, Row | None, list[Row]]"
"""The token of a claim, and one failure; or None and, for each kind of several, n and names."""
_log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Where alerts go."""

    hook: FailureHook | None
    command: tuple[str, ...]
    """The program and its arguments; () for none."""
    on_failure: Mapping[str, FailureHook] = MappingProxyType({})
    """The functions of schedules, by name."""

    @property
    def has_hook(self) -> bool:
        """Return whether there is a function to call."""
        return self.hook is not None or bool(self.on_failure)

    @property
    def wanted(self) -> bool:
        """Return whether there is a function or a command."""
        return self.has_hook or bool(self.command)


def read_settings() -> Settings:
    """Return the settings in force; raise `InvalidConfig`, which lists the allowed values."""
    cfg = config.get_config()
    hooks = {one.name: getattr(one, "on_failure", None) for one in cfg.ingest_schedule}
    of_schedules = {name: hook for name, hook in hooks.items() if hook is not None}
    return Settings(cfg.on_failed, _command(config.ON_FAILED.read()), of_schedules)


def _command(text: str) -> tuple[str, ...]:
    name = config.ON_FAILED.variables[0]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200} cannot be read: {error}; write a program and its arguments, "
            "quoted as in a shell"
        ) from None
    if words and shutil.which(words[0]) is None:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200} names no executable: {words[0]!r:.200}; name a program on "
            "PATH or the path of one, or `sh -c '...'` for a line of shell"
        )
    return tuple(words)


class Sender:
    """Sends failures until it is stopped; any number of processes may have one.

    A failure is sent once; twice if the sender dies, or loses the database, between the call and
    the commit of `sent_at`.
    """

    def __init__(self, given: Settings) -> None:
        self._settings = given
        self._hooks = service.Thread("failure hook", lambda _: None)
        """The thread of the last alert's hooks."""
        self._command = external_tool.PipedCommand(given.command) if given.command else None
        self._loop = service.Loop("failure alerts", [service.Task("send", POLL_S, self.run_once)])
        self._announced: float | None = None
        self._sent: list[str] = []
        """Tokens of calls that were made and are not recorded yet."""
        self._stopping = threading.Event()
        self._ends_at = float("inf")

    def start(self) -> None:
        """Start its thread, which polls for failures every POLL_S."""
        whom = ["the app's functions"] if self._settings.has_hook else []
        whom += [self._settings.command[0]] if self._command else []
        text = "failures are sent to %s, in at most %d calls a minute"
        _log.info(text, " and ".join(whom), PER_MINUTE)
        self._loop.start()

    def stop(self) -> None:
        """Stop soon. A hook that hangs is left behind, on a thread that keeps no process alive."""
        self._ends_at = min(self._ends_at, time.monotonic() + STOP_GRACE_S)
        self._stopping.set()
        self._loop.stop(STOP_S)

    def __enter__(self) -> Sender:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run_once(self) -> int:
        """Send waiting failures, within the limit of all senders; return how many calls it made."""
        calls = 0
        while not self._stopping.is_set():
            self._note()
            can_call = self._settings.has_hook and not self._hooks.alive
            if not (can_call or self._command) or (taken := self._take()) is None:
                break
            token, failure, kinds = taken
            alert = _summary(kinds) if failure is None else _single(failure)
            if self._send(alert, can_call=can_call):
                calls += 1
                self._sent.append(token)
        self._note()
        return calls

    def _take(self) -> Taken | None:
        now = time.monotonic()
        due = self._announced is None or now - self._announced >= ANNOUNCE_S
        with db.transaction() as conn:
            if due:
                statements.failure_alerts.announce(conn, keep_s=MAX_AGE_S)
            taken = take(conn, app=app_loading.app_name())
        if due:
            self._announced = now
        return taken

    def _note(self) -> None:
        while self._sent:
            with db.transaction() as conn:
                statements.failure_alerts.sent(conn, token=self._sent[0])
            self._sent.pop(0)

    def _send(self, alert: JsonDict, *, can_call: bool) -> bool:
        """Make the calls of one alert; return whether none was cut short by `stop()`."""
        # One line of ASCII, at most about 64 KiB.
        text, line = json.dumps(alert, ensure_ascii=True).encode() + b"\n", alert["text"]
        problems = [self._call(alert)] if can_call else []
        if self._command is not None:
            problems.append(self._command.run(text, timeout_s=TIMEOUT_S, ends_early=self._is_over))
        for problem in filter(None, problems):
            _log.warning("failure alert: %s; it was for: %s", problem, line)
        return not (self._is_over() and any(problems))

    def _call(self, alert: JsonDict) -> str | None:
        """Call the hooks of an alert on a thread; return the problem, or None.

        An error of a hook is only logged. After TIMEOUT_S, and when this sender is over, it goes on
        without the hooks' return.
        """

        def call(_: threading.Event) -> None:
            of_schedule = self._settings.on_failure.get(alert["schedule"])
            for hook in filter(None, (of_schedule, self._settings.hook)):
                # A copy: the others, and the command, get the alert whatever a hook does to it.
                _called(hook, dict(alert), alert["text"])

        self._hooks = service.Thread("failure hook", call)
        self._hooks.start()
        deadline = time.monotonic() + TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            if self._hooks.stop(min(STEP_S, left_s)):
                return None
            if self._is_over():
                return "the hook has not returned, and this process stops"
        return f"the hook has not returned within {TIMEOUT_S:g} s; until it does, it is not called"

    def _is_over(self) -> bool:
        return self._stopping.is_set() and time.monotonic() >= self._ends_at


# --- claims of failures ----------------------------------------------------------------------


def take(conn: db.Connection, *, app: str) -> Taken | None:
    """Claim the next failures for a sender of `app`. Failures over MAX_AGE_S old are deleted.

    Returns None if no failure waits, the limit is reached, or another sender claims right now.

    A sender makes up to PER_MINUTE calls a minute, each with one failure. If several failures
    wait for the last of these calls, it takes all of them, and the next call is a minute later.
    """
    alerts = statements.failure_alerts
    if not alerts.pending(conn) or alerts.lock(conn) is None:
        return None
    _expire(conn)
    mine: dict[str, Any] = {"app": app, "patience_s": PATIENCE_S}
    free = alerts.free(conn, per_minute=PER_MINUTE)
    if not free or not (waiting := alerts.waiting(conn, **mine)):
        return None
    if free == 1:
        alerts.quiet(conn)
    token = secrets.token_hex(8)
    mine |= {"token": token, "lease_s": 2 * TIMEOUT_S + LEASE_SPARE_S}
    if free == 1 and waiting > 1:
        kinds = alerts.take_all(conn, **mine)
        return (token, None, kinds) if kinds else None
    one = alerts.take(conn, **mine)
    return (token, one, []) if one else None


def _expire(conn: db.Connection) -> None:
    rows = statements.failure_alerts.expire(conn, max_age_s=MAX_AGE_S, tries=TRIES)
    lost = [row for row in rows if not row["is_sent"]]
    if not lost:
        return
    tried = [row for row in lost if row["claims"] >= TRIES]
    for row in tried[:5]:
        _log.warning(
            "failure of %s %s: %d senders ended during the call; it is not sent again",
            row["kind"], display.line(row["subject"]), row["claims"],
        )  # fmt: skip
    if count := len(lost) - len(tried):
        _log.warning(
            "%s over %g s old will not be sent", display.counted(count, "failure"), MAX_AGE_S
        )


# --- the text of an alert ---------------------------------------------------------------------


def _single(row: Row) -> JsonDict:
    """Return the alert of one failure; docs/alerts.md lists its keys."""
    error = None if row["error"] is None else masking.mask(row["error"])[:ERROR_LIMIT]
    place = [
        f"{key} {display.line(row[key])}"
        for key in ("queue", "schedule")
        if row[key] is not None and row[key] != row["subject"]
    ]
    text = f"{row['kind']} {display.line(row['subject'])}"
    if row["name"] is not None:
        text += f" of {'workflow' if row['kind'] == 'run' else 'task'} {display.line(row['name'])}"
    text += f" ({', '.join(place)})" if place else ""
    text += f" {_FAILED[row['reason']]}: {error or 'no error is stored'}"
    return {
        "kind": row["kind"],
        "id": row["subject"],
        **{key: row[key] for key in ("name", "queue", "schedule", "reason")},
        "error": error,
        "at": _iso(row["failed_at"]),
        "count": 1,
        "text": display.line(text, TEXT_LIMIT),
    }


def _summary(kinds: list[Row]) -> JsonDict:
    """Return the alert of several failures, with the keys of one."""
    count = sum(row["n"] for row in kinds)
    parts = [
        f"{row['n']} {row['kind']}{'s' if row['n'] > 1 else ''} "
        f"({', '.join(display.line(name, 60) for name in row['names'])})"
        for row in kinds
    ]
    return {
        "kind": "summary",
        **dict.fromkeys(("id", "name", "queue", "schedule")),
        "reason": "limit",
        "error": None,
        "at": _iso(max(row["failed_at"] for row in kinds)),
        "count": count,
        "text": display.line(f"{count} more failures: {', '.join(parts)}", TEXT_LIMIT),
    }


def _iso(at: Any) -> str | None:
    return at.astimezone(timezone.utc).isoformat() if isinstance(at, datetime) else None


def _called(hook: FailureHook, alert: JsonDict, text: str) -> None:
    try:
        returned: object = hook(alert)
        if hasattr(returned, "__await__"):
            getattr(returned, "close", lambda: None)()
            _log.error("the failure hook is async, and is not awaited; write it as a plain `def`")
    except BaseException as error:  # noqa: BLE001  boundary around app code: it may exit
        _log.error("the failure hook raised %s for: %s", type(error).__name__, text, exc_info=error)
