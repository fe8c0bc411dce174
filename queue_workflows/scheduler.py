"""Run `queue-scheduler`: fire each due instant of each schedule once, however many run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from queue_workflows import config, db, tasks, types
from queue_workflows import schedules as api
from queue_workflows.alerts import sender
from queue_workflows.db import check_violations, statements
from queue_workflows.engine import row_isolation, schedule_rows
from queue_workflows.operations import code_schedules
from queue_workflows.runtime import app_loading, entry_point, signals
from queue_workflows.schedule import definition, old_style_entries
from queue_workflows.schedule import entry as schedule_entry

PROG = "queue-scheduler"
LOOK_EVERY_S = 30.0
"""Longest wait between two readings of the database's clock, so that a step of it is noticed."""
WAIT_MIN_S = 0.02
LOCKED_RETRY_S = 0.25
CLOCK_STEP_S = 1.0
"""Seconds by which the database's clock has to go back before schedules are planned again."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 5.0
BOOT = "boot"
_DATABASE_ERRORS = (db.Error, OSError)

ScheduleEntry = schedule_entry.ScheduleEntry
_log = logging.getLogger("queue_workflows.scheduler")


@check_violations.translated()
def enqueue_due(due: Iterable[ScheduleEntry], *, reason: str = "tick") -> list[str]:
    """Queue each entry's job for its latest instant; the ids of the jobs queued by this call.

    The caller knows that these entries are due; an instant that has fired already is left out. The
    instant is the last at or before the database's now. One transaction. Raises `UnknownQueue`,
    `UnknownTask` or `ArgsRefused` (ValueErrors) before any write.
    """
    checked = code_schedules.check_entries(old_style_entries.check(due))
    with db.transaction() as conn:
        now = statements.schedules.now(conn)
        return _fire(conn, [(entry, entry.previous_fire_at(now)) for entry in checked], reason)


@check_violations.translated()
def enqueue_boot_kick(schedule: Iterable[ScheduleEntry] | None = None) -> list[str]:
    """Queue every entry's job once now, with reason `boot`; the ids of the jobs queued.

    At most one boot job per entry name and hour (UTC), for any number of calls. Entries whose
    task name contains `freshness` are left out. None: the configured schedule. Raises as
    `enqueue_due` does.
    """
    entries = [e for e in _schedule(schedule) if "freshness" not in e.task_name]
    checked = code_schedules.check_entries(entries)
    with db.transaction() as conn:
        now = schedule_entry.as_utc(statements.schedules.now(conn))
        hour = now.replace(minute=0, second=0, microsecond=0)
        fires = [(entry, hour) for entry in checked]
        return _fire(conn, fires, BOOT, suffix=schedule_entry.BOOT_SUFFIX)


def _fire(
    conn: db.Connection, fires: Iterable[old_style_entries.Fire], reason: str, *, suffix: str = ""
) -> list[str]:
    ids: list[str] = []
    for entry, fire_at in sorted(fires, key=old_style_entries.order):
        task = tasks.row_defaults(entry.task_name)
        job_id = statements.schedules.fire(
            conn,
            name=entry.name + suffix,
            fire_at=fire_at,
            task_name=entry.task_name,
            queue=entry.queue,
            reason=reason,
            priority=task.get("priority"),
            lock_key=task.get("lock_key"),
        )
        if job_id is not None:
            ids.append(job_id)
    return ids


def _schedule(schedule: Iterable[ScheduleEntry] | None) -> list[ScheduleEntry]:
    return (
        old_style_entries.split(config.get_config().ingest_schedule)[0]
        if schedule is None
        else old_style_entries.check(schedule)
    )


class Ticker:
    """Fires what is due by the database's clock, and waits by the process's monotonic one.

    `schedule` None follows `set_ingest_schedule`, also when it changes, and the table `schedules`;
    a given one fires its own entries alone. `now_fn` replaces the database's clock (a datetime),
    `sleep_fn` the waiting, which `stop()` then does not interrupt. `boot_kick`: the first call
    queues each old-style entry of which nothing was queued within its period. `listens` False: it
    is told by `wake` that the table has changed, and needs no connection for that.
    """

    def __init__(
        self,
        *,
        schedule: Iterable[ScheduleEntry | definition.Schedule] | None = None,
        now_fn: Callable[[], datetime] | None = None,
        sleep_fn: types.SleepFn | None = None,
        boot_kick: bool = False,
        listens: bool = True,
    ) -> None:
        given = None if schedule is None else [*schedule]
        old_style_entries.split(given or ())
        self._now = now_fn
        self._code = code_schedules.CodeSchedules(given, now_fn)
        self._stopping = signals.Flag()
        channels = (schedule_rows.CHANNEL,) if listens else ()
        self._pause_s = 0.0
        self._listener = db.listen(*channels, poll_s=lambda: self._pause_s)
        self._sleep = sleep_fn
        self._boot_kick = boot_kick
        self._isolation = row_isolation.Isolation()
        self._seen: datetime | None = None
        self._seen_at = 0.0
        self._wake_at: datetime | None = None
        self._logged_empty = False
        self._failures = 0

    def stop(self) -> None:
        """Stop `run_forever` soon; callable from any thread or signal handler."""
        self._stopping.set()
        self._listener.close()

    def wake(self) -> None:
        """Look at the table soon; callable from any thread."""
        self._listener.wake()

    def run_once(self) -> list[str]:
        """Fire what has come due since the last call; return the ids of the queued jobs and runs.

        It first stores the schedules of the code that have changed. A schedule that never fired
        starts now. One transaction for each batch of schedules. Database errors pass, and what is
        left comes with the next call.
        """
        self._code.store()
        scope = self._code.scope()
        queued: list[str] = []
        more = True
        while more and not self._stopping.is_set():
            with db.transaction() as conn:
                seen_at = time.monotonic()
                now = self._database_now(conn)
                self._check_clock(conn, now)
                fired = schedule_rows.fire_due(conn, now, scope, self._isolation)
                has_rows, self._wake_at = schedule_rows.next_wake(conn, scope, self._isolation)
            queued += fired.queued
            more, self._seen, self._seen_at = fired.more, now, seen_at
            self._report(fired.missed, is_empty=not has_rows and self._code.is_empty())
        if self._boot_kick and not self._stopping.is_set():
            queued += self._code.boot()
            self._boot_kick = False
        return queued

    def _database_now(self, conn: db.Connection) -> datetime:
        return schedule_entry.as_utc(self._now() if self._now else statements.schedules.now(conn))

    def _check_clock(self, conn: db.Connection, now: datetime) -> None:
        if self._seen is None:
            statements.schedule_rows.plan_again(
                conn, now=now, all=False, poll_s=schedule_rows.OVERLAP_POLL_S
            )
        elif (behind_s := (self._seen - now).total_seconds()) > CLOCK_STEP_S:
            _log.warning("the clock went back by %.1f s; nothing is fired twice", behind_s)
            statements.schedule_rows.plan_again(
                conn, now=now, all=True, poll_s=schedule_rows.OVERLAP_POLL_S
            )

    def _report(self, missed: list[schedule_rows.Missed], *, is_empty: bool) -> None:
        """Log what a committed batch found: the place for everything that follows from it."""
        for one in missed:
            first, last = one.first.isoformat(), one.last.isoformat()
            what = f"instant {first}" if first == last else f"instants from {first} to {last}"
            _log.warning("schedule %r missed its %s", one.name, what)
        if is_empty and not self._logged_empty:
            self._logged_empty = True
            _log.info(
                "the schedule is empty, waiting: schedules.set([...]) in the app (--app) fills it, "
                "or a row of the table schedules"
            )

    def run_forever(self) -> None:
        """Call `run_once` at every due instant until `stop()`; wait while the database is away.

        A change of the table `schedules` wakes it, unless `sleep_fn` replaces the waiting.
        """
        if self._sleep is not None:
            while not self._stopping.is_set():
                self._sleep(self._step_s())
            return
        for _ in self._listener:
            self._pause_s = self._step_s()

    def _step_s(self) -> float:
        """Call `run_once`; return how many seconds to wait then."""
        try:
            self.run_once()
        except _DATABASE_ERRORS as error:
            # Schedulers that start together store the same rows, and wait for each other.
            if not self._failures and not row_isolation.is_busy(error):
                away = isinstance(error, OSError) or row_isolation.is_outage(error)
                what = "waits for the database" if away else "cannot be followed, it is tried again"
                _log.warning("the schedule %s: %s", what, entry_point.mask(str(error)))
            longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
            self._failures += not row_isolation.is_busy(error)
            return longest * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        if self._failures:
            _log.warning("the schedule continues")
        self._failures = 0
        return self.pause_s()

    def pause_s(self) -> float:
        """Return the seconds until the next schedule is due, at most LOOK_EVERY_S."""
        if self._seen is None or self._wake_at is None:
            return LOOK_EVERY_S
        due_in_s = (self._wake_at - self._seen).total_seconds()
        # What is due already is locked by another scheduler.
        least_s = WAIT_MIN_S if due_in_s > 0 else LOCKED_RETRY_S
        return min(LOOK_EVERY_S, max(least_s, due_in_s - (time.monotonic() - self._seen_at)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ticker until SIGTERM or SIGINT; the exit code: 0, or 2 for input it refuses."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=PROG,
        description="Queue ingest jobs at the minutes that the app's schedule names.",
    )
    entry_point.add_common_arguments(parser)
    parser.add_argument(
        "--boot-kick",
        action="store_true",
        help="queue every old-style entry at start (reason: boot), even one that has just fired",
    )
    args = parser.parse_args(argv)
    return entry_point.run_main(PROG, lambda: _serve(args), debug=args.debug)


def _serve(args: argparse.Namespace) -> int:
    entry_point.start(args)
    app_loading.load_app(args.app)
    service = Service()
    with signals.StopRequest(on_first=service.ticker.stop) as stop:
        if not db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            return 0
        service.run(boot_kick=args.boot_kick)
    return 0


class Service:
    """What a scheduler does for the loaded app: it follows schedules and sends failure alerts.

    Raises `InvalidConfig` and its like for schedules and settings of alerts that cannot work.
    """

    def __init__(self, *, listens: bool = True) -> None:
        old, new = old_style_entries.split(config.get_config().ingest_schedule)
        code_schedules.check_entries(old)
        for one in new:
            api.check(one)
        self._alerts = sender.read_settings()
        self._count = len(old) + len(new)
        self.ticker = Ticker(boot_kick=not config.DISABLE_BOOT_KICK.read(), listens=listens)
        self.listens = {schedule_rows.CHANNEL: self.ticker.wake}
        """What to call on a notification of which channel, if the ticker does not listen."""

    def run(self, *, boot_kick: bool = False) -> None:
        """Serve until `ticker.stop()`; the database has the schema."""
        if self._count:
            _log.info("following %d schedule entries", self._count)
        if boot_kick:
            _boot_kick()
        alerts = self._alerts
        with sender.Sender(alerts) if alerts.wanted else contextlib.nullcontext():
            self.ticker.run_forever()


def _boot_kick() -> None:
    try:
        _log.info("boot kick: %d jobs queued", len(enqueue_boot_kick()))
    except _DATABASE_ERRORS as error:
        _log.error("boot kick left out: %s", entry_point.mask(str(error)))


if __name__ == "__main__":
    sys.exit(main())
