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
from typing import Any

from queue_workflows import config, db, errors, types
from queue_workflows import schedules as api
from queue_workflows.alerts import sender
from queue_workflows.claim import row_isolation
from queue_workflows.db import check_violations, statements
from queue_workflows.dispatch import schedule_rows
from queue_workflows.runtime import app_loading, entry_point, masking, signals
from queue_workflows.schedule import expression, timetable

PROG = "queue-scheduler"
LOOK_EVERY_S = 30.0
"""Longest wait between two readings of the database's clock, so that a step of it is noticed."""
WAIT_MIN_S = 0.02
LOCKED_RETRY_S = 0.25
CLOCK_STEP_S = 1.0
"""Seconds by which the database's clock has to go back before schedules are planned again."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 5.0
STORED_AT_ONCE = 50
"""How many schedules one transaction stores."""
RETRY_S = 30.0
"""Seconds until schedules with another app's name, or unknown tasks, are tried again."""
_DATABASE_ERRORS = (db.Error, OSError)
_Now = Callable[[db.Connection], datetime]

ScheduleEntry = timetable.ScheduleEntry
_log = logging.getLogger("queue_workflows.scheduler")


@check_violations.translated()
def enqueue_due(due: Iterable[ScheduleEntry], *, reason: str = "tick") -> list[str]:
    """Queue each entry's job for its latest instant; return the ids of the queued jobs.

    The caller knows that these entries are due; an instant that has fired already is left out. The
    instant is the last at or before the database's now. One transaction. Raises `UnknownQueue`,
    `UnknownTask` or `ArgsRefused` (ValueErrors) before any write.
    """
    checked = _check_entries(timetable.check(due))
    with db.transaction() as conn:
        now = statements.schedules.now(conn)
        return _fire(conn, [(entry, entry.previous_fire_at(now)) for entry in checked], reason)


@check_violations.translated()
def enqueue_boot_kick(schedule: Iterable[ScheduleEntry] | None = None) -> list[str]:
    """Queue every entry's job once now, with reason `boot`; return the ids of the queued jobs.

    However often it is called, it queues at most one boot job per entry name and hour (UTC).
    Entries whose task name contains `freshness` are left out. `schedule` defaults to the configured
    one. Raises as `enqueue_due` does.
    """
    if schedule is None:
        chosen = timetable.split(config.get_config().ingest_schedule)[0]
    else:
        chosen = timetable.check(schedule)
    checked = _check_entries([one for one in chosen if "freshness" not in one.task_name])
    with db.transaction() as conn:
        now = expression.as_utc(statements.schedules.now(conn))
        hour = now.replace(minute=0, second=0, microsecond=0)
        fires = [(entry, hour) for entry in checked]
        return _fire(conn, fires, "boot", suffix=timetable.BOOT_SUFFIX)


def _fire(
    conn: db.Connection,
    fires: Iterable[tuple[ScheduleEntry, datetime]],
    reason: str,
    *,
    suffix: str = "",
) -> list[str]:
    ids: list[str] = []
    # Sorted, so that schedulers that claim the same instants cannot deadlock.
    for entry, fire_at in sorted(fires, key=lambda fire: (fire[1], fire[0].name)):
        row = dict.fromkeys(timetable.COLUMNS) | vars(entry)
        made = schedule_rows.fire_once(conn, row, entry.name + suffix, fire_at, reason)
        ids += [] if made is None or made["job_id"] is None else [made["job_id"]]
    return ids


def _check_entries(entries: list[ScheduleEntry]) -> list[ScheduleEntry]:
    """Return the entries; raise if their queue, task or lack of args is refused here."""
    for one in entries:
        api.check(
            timetable.Schedule(one.name, one.expression, task_name=one.task_name, queue=one.queue)
        )
    return entries


class _CodeSchedules:
    """The schedules in the app's code, and the state of storing them.

    Without `given`, it follows `set_ingest_schedule`, and also marks stored schedules that the
    app's code does not name any more.
    """

    def __init__(self, given: list[Any] | None, now_fn: _Now, *, has_clock: bool) -> None:
        self._given = given
        self._now = now_fn
        self._has_clock = has_clock
        self._seen: list[Any] | None = None
        self.wanted: list[tuple[timetable.Schedule, str, bool]] = []
        """Each schedule of the code with its digest, and whether it was an old-style entry."""
        self._left_out: set[str] = set()
        self._retry_at: float | None = None
        self._logged: set[str] = set()

    def scope(self) -> schedule_rows.Scope:
        """Return which schedules this process fires."""
        names = None if self._given is None else [one.name for one, *_ in self.wanted]
        known = [*config.get_config().ingest_task_map]
        return schedule_rows.Scope(app_loading.app_name(), known, names)

    def store(self) -> None:
        """Store the code's schedules if they have changed, and mark the ones that are gone."""
        chosen = config.get_config().ingest_schedule if self._given is None else self._given
        is_due = self._retry_at is not None and time.monotonic() >= self._retry_at
        # Comparing lists is fast if they hold the same objects.
        if chosen == self._seen and not is_due:
            return
        self._seen, self._retry_at = None, None
        seen = [*chosen]
        self._choose(seen)
        app = app_loading.app_name()
        refused = self._put(app)
        with db.transaction() as conn:
            statements.schedule_definitions.end_clashes(conn, app=app, names=[*refused])
            if self._given is None and (seen or app_loading.names_app()):
                kept = {one.name for one, *_ in self.wanted} | self._left_out
                for name in statements.schedule_definitions.mark_gone(
                    conn, app=app, names=sorted(kept)
                ):
                    _log.warning("schedule %r is not in the code now, and does not fire", name)
        if refused or self._left_out:
            self._retry_at = time.monotonic() + RETRY_S
        self._seen = seen

    def _choose(self, chosen: list[Any]) -> None:
        """Note which schedules can be stored, and log which ones are left out and why."""
        old, new = timetable.split(chosen)
        usable: list[ScheduleEntry] = []
        self._left_out, self.wanted = set(), []
        for one in old:
            try:
                usable += _check_entries([one])
            except (errors.UnknownQueue, errors.UnknownTask) as error:
                self._leave_out(one.name, str(error).removeprefix(f"schedule {one.name!r}: "))
        for is_old, part in ((True, timetable.converted(usable)), (False, new)):
            for one in part:
                try:
                    self.wanted.append((one, schedule_rows.encoded(one)[1], is_old))
                except errors.QueueWorkflowsError as error:
                    self._leave_out(one.name, error)

    def _leave_out(self, name: str, why: object) -> None:
        self._left_out.add(name)
        self._log_once(f"schedule {name!r} is left out: {why}")

    def _put(self, app: str) -> list[str]:
        """Store changed schedules; return the names that the table or another app already has."""
        with db.transaction() as conn:
            known = {
                row["name"]: row["definition_hash"]
                for row in statements.schedule_definitions.stored(conn, app=app)
            }
        changed = [each for each in self.wanted if known.get(each[0].name) != each[1]]
        # In one order, so that schedulers that start together cannot deadlock.
        changed.sort(key=lambda each: each[0].name)
        refused: list[str] = []
        for start in range(0, len(changed), STORED_AT_ONCE):
            with db.transaction() as conn:
                for one, _, is_old in changed[start : start + STORED_AT_ONCE]:
                    if not self._put_one(conn, one, app, is_old=is_old):
                        refused.append(one.name)
        return refused

    def _put_one(
        self, conn: db.Connection, one: timetable.Schedule, app: str, *, is_old: bool
    ) -> bool:
        try:
            with conn.transaction():
                found = schedule_rows.put(conn, one, app)
        except db.Error as error:
            if not row_isolation.is_of_row(error):
                raise
            self._leave_out(one.name, row_isolation.described(error))
            return True
        except errors.InvalidConfig as error:
            statements.schedule_definitions.clash(conn, name=one.name, app=app)
            self._log_once(f"{error}; until then it does not fire for app {app!r}")
            return False
        if found is not None:
            _log.info("schedule %r is stored", one.name)
            if self._has_clock:
                statements.schedule_definitions.begin(conn, name=one.name, now=self._now(conn))
            if is_old and found["inserted"]:
                statements.schedule_definitions.adopt(conn, name=one.name, now=self._now(conn))
        return True

    def boot(self) -> list[str]:
        """Queue each old-style entry that has not queued a job within its period.

        Returns the ids of the jobs. Entries that are paused, or whose task name contains
        `freshness`, are left out. Several schedulers that start together queue one job.
        """
        app, ids = app_loading.app_name(), list[str]()
        names = sorted(
            one.name
            for one, _, is_old in self.wanted
            if is_old and "freshness" not in (one.task_name or "")
        )
        for start in range(0, len(names), schedule_rows.BATCH):
            with db.transaction() as conn:
                now = self._now(conn)
                lock = statements.schedule_definitions.lock
                rows = [lock(conn, name=one) for one in names[start : start + schedule_rows.BATCH]]
                kicked = [
                    schedule_rows.boot(conn, row, now)
                    for row in rows
                    if row is not None and row["app"] == app
                ]
            ids += [made for made in kicked if made is not None]
        if ids:
            _log.info("boot kick: %d jobs queued", len(ids))
        return ids

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("%s", text)


class Ticker:
    """Fires due schedules by the database's clock, and waits by the process's monotonic clock.

    Without `schedule`, it follows `set_ingest_schedule` and the table `schedules`; otherwise it
    fires only the given entries. `now_fn` replaces the database's clock (a datetime), `sleep_fn`
    the waiting, which `stop()` then does not interrupt. With `boot_kick`, the first call queues
    each old-style entry that has not queued a job within its period. Without `listens`, it opens no
    connection to listen; call `wake` when the table has changed.
    """

    def __init__(
        self,
        *,
        schedule: Iterable[ScheduleEntry | timetable.Schedule] | None = None,
        now_fn: Callable[[], datetime] | None = None,
        sleep_fn: types.SleepFn | None = None,
        boot_kick: bool = False,
        listens: bool = True,
    ) -> None:
        given = None if schedule is None else [*schedule]
        timetable.split(given or ())
        self._now_fn = now_fn
        self._code = _CodeSchedules(given, self._now, has_clock=now_fn is not None)
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
        """Stop `run_forever` soon; any thread or signal handler may call this."""
        self._stopping.set()
        self._listener.close()

    def wake(self) -> None:
        """Read the table soon; any thread may call this."""
        self._listener.wake()

    def run_once(self) -> list[str]:
        """Fire what has come due since the last call; return the ids of the queued jobs and runs.

        It first stores the code's schedules that have changed. A schedule that never fired starts
        now. Each batch of schedules is a transaction. Database errors pass through, and the next
        call fires the rest.
        """
        self._code.store()
        scope = self._code.scope()
        queued: list[str] = []
        more = True
        while more and not self._stopping.is_set():
            with db.transaction() as conn:
                seen_at = time.monotonic()
                now = self._now(conn)
                self._check_clock(conn, now)
                batch = schedule_rows.Batch(conn, now, scope)
                batch.run(self._isolation)
                given = scope.given(self._isolation)
                wake = statements.schedule_rows.wake(conn, **given)
            queued += batch.queued
            self._wake_at = wake["wake_at"]
            more, self._seen, self._seen_at = batch.more, now, seen_at
            for name, *instants in batch.missed:
                first, last = (at.isoformat() for at in instants)
                what = f"instant {first}" if first == last else f"instants from {first} to {last}"
                _log.warning("schedule %r missed its %s", name, what)
            if not (wake["any"] or self._code.wanted or self._logged_empty):
                self._logged_empty = True
                _log.info(
                    "the schedule is empty, waiting: schedules.set([...]) in the app (--app) fills "
                    "it, or a row of the table schedules"
                )
        if self._boot_kick and not self._stopping.is_set():
            queued += self._code.boot()
            self._boot_kick = False
        return queued

    def _now(self, conn: db.Connection) -> datetime:
        return expression.as_utc(self._now_fn() if self._now_fn else statements.schedules.now(conn))

    def _check_clock(self, conn: db.Connection, now: datetime) -> None:
        behind_s = 0.0 if self._seen is None else (self._seen - now).total_seconds()
        if behind_s > CLOCK_STEP_S:
            _log.warning("the clock went back by %.1f s; nothing is fired twice", behind_s)
        if self._seen is None or behind_s > CLOCK_STEP_S:
            poll_s, every = schedule_rows.OVERLAP_POLL_S, self._seen is not None
            statements.schedule_rows.plan_again(conn, now=now, all=every, poll_s=poll_s)

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
                _log.warning("the schedule %s: %s", what, masking.mask(str(error)))
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
        # A schedule that is due already is locked by another scheduler.
        least_s = WAIT_MIN_S if due_in_s > 0 else LOCKED_RETRY_S
        return min(LOOK_EVERY_S, max(least_s, due_in_s - (time.monotonic() - self._seen_at)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ticker until SIGTERM or SIGINT; return 0, or 2 for refused input."""
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
    """Follows the schedules of the loaded app and sends its failure alerts.

    Raises `InvalidConfig` and similar errors for schedules and settings of alerts that cannot work.
    """

    def __init__(self, *, listens: bool = True) -> None:
        old, new = timetable.split(config.get_config().ingest_schedule)
        _check_entries(old)
        for one in new:
            api.check(one)
        self._alerts = sender.read_settings()
        self._count = len(old) + len(new)
        self.ticker = Ticker(boot_kick=True, listens=listens)
        self.listens = {schedule_rows.CHANNEL: self.ticker.wake}
        """Functions to call on notifications, by channel, if the ticker does not listen."""

    def run(self, *, boot_kick: bool = False) -> None:
        """Serve until `ticker.stop()`; the database must have the schema."""
        if self._count:
            _log.info("following %d schedule entries", self._count)
        if boot_kick:
            try:
                _log.info("boot kick: %d jobs queued", len(enqueue_boot_kick()))
            except _DATABASE_ERRORS as error:
                _log.error("no boot kick, the database failed: %s", masking.mask(str(error)))
        alerts = self._alerts
        with sender.Sender(alerts) if alerts.wanted else contextlib.nullcontext():
            self.ticker.run_forever()


if __name__ == "__main__":
    sys.exit(main())
