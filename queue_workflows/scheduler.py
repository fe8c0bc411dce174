"""Queue one ingest job per schedule entry and due instant, however many schedulers run."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from queue_workflows import config, db, errors, tasks, types
from queue_workflows.db import check_violations
from queue_workflows.engine import row_isolation, schedule_rows, schedules
from queue_workflows.runtime import entry_point, signals
from queue_workflows.schedule import definition, plan
from queue_workflows.schedule import entry as schedule_entry

PROG = "queue-scheduler"
LOOK_EVERY_S = 30.0
"""Longest wait between two looks at the database's clock, so that a step of it is noticed."""
WAIT_MIN_S = 0.02
LOCKED_RETRY_S = 0.25
CLOCK_STEP_S = 1.0
"""Seconds by which the database's clock has to go back before schedules are planned again."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 5.0
BOOT = "boot"
FIRE = "fire of schedule entry"
_DATABASE_ERRORS = (db.Error, OSError)

ScheduleEntry = schedule_entry.ScheduleEntry
_log = logging.getLogger("queue_workflows.scheduler")


@check_violations.translated()
def enqueue_due(entries: Iterable[ScheduleEntry], *, reason: str = "tick") -> list[str]:
    """Queue each entry's job for its latest instant; the ids of the jobs queued by this call.

    The caller says that the entries are due; an instant that anybody has fired is left out. The
    instant is the last at or before the database's now. One transaction. Raises `UnknownQueue`,
    `UnknownTask` or `ArgsRefused` (ValueErrors) before any write.
    """
    checked = _checked_jobs(plan.check(entries))
    with db.transaction() as conn:
        now = schedules.database_now(conn)
        return _fire(conn, [(entry, entry.previous_fire_at(now)) for entry in checked], reason)


@check_violations.translated()
def enqueue_boot_kick(schedule: Iterable[ScheduleEntry] | None = None) -> list[str]:
    """Queue every entry's job once now, with reason `boot`; the ids of the jobs queued.

    At most one boot job per entry name and hour (UTC), whoever asks however often. Entries whose
    task name contains `freshness` are left out. None: the configured schedule. Raises as
    `enqueue_due` does.
    """
    entries = [e for e in _schedule(schedule) if "freshness" not in e.task_name]
    checked = _checked_jobs(entries)
    with db.transaction() as conn:
        now = schedule_entry.as_utc(schedules.database_now(conn))
        hour = now.replace(minute=0, second=0, microsecond=0)
        fires = [(entry, hour) for entry in checked]
        return _fire(conn, fires, BOOT, suffix=schedule_entry.BOOT_SUFFIX)


def _fire(
    conn: db.Connection, fires: Iterable[plan.Fire], reason: str, *, suffix: str = ""
) -> list[str]:
    ids: list[str] = []
    for entry, fire_at in sorted(fires, key=plan.order):
        task = tasks.row_defaults(entry.task_name)
        job_id = schedules.fire(
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


def _fire_one(fire: plan.Fire) -> list[str]:
    with db.transaction() as conn:
        return _fire(conn, [fire], "tick")


def _schedule(schedule: Iterable[ScheduleEntry] | None) -> list[ScheduleEntry]:
    return (
        plan.split(config.get_config().ingest_schedule)[0]
        if schedule is None
        else plan.check(schedule)
    )


def _checked_jobs(entries: list[ScheduleEntry]) -> list[ScheduleEntry]:
    for entry in entries:
        config.check_queue(entry.queue, config.get_config().ingest_queues)
        if entry.task_name not in config.get_config().ingest_task_map:
            known = ", ".join(sorted(config.get_config().ingest_task_map)) or "none"
            raise errors.UnknownTask(
                f"schedule entry {entry.name!r}: no ingest task {entry.task_name!r}, registered "
                f"are {known}; register_ingest_task() in the app (--app) adds it"
            )
        try:
            tasks.check_args(entry.task_name, {})
        except errors.ArgsRefused as error:
            raise errors.ArgsRefused(
                f"schedule entry {entry.name!r}: it sends no args, and {error}"
            ) from None
    return entries


class _RowsTicker:
    """Fires the rows of `schedules`, after it has stored those of the code there."""

    def __init__(self, now_fn: Callable[[], datetime] | None, stopped: Callable[[], bool]) -> None:
        self._now = now_fn
        self._stopped = stopped
        self._stored: list[definition.Schedule] | None = None
        self._seen: datetime | None = None
        self._seen_at = 0.0
        self._wake_at: datetime | None = None
        self.has_rows = False

    def run_once(self, rows: list[definition.Schedule], *, synchronize: bool) -> list[str]:
        """Fire what is due; return the ids queued. A transaction for each batch of schedules."""
        if synchronize and rows != self._stored:
            self._store(rows)
        ids: list[str] = []
        count = schedule_rows.BATCH
        while count == schedule_rows.BATCH and not self._stopped():
            with db.transaction() as conn:
                seen_at = time.monotonic()
                now = self._now() if self._now else schedules.database_now(conn)
                self._check_clock(conn, now)
                count, queued = schedule_rows.fire_due(conn, now)
                self.has_rows, self._wake_at = schedule_rows.next_wake(conn)
            ids += queued
            self._seen, self._seen_at = now, seen_at
        return ids

    def _check_clock(self, conn: db.Connection, now: datetime) -> None:
        if self._seen is None:
            schedule_rows.forget_errors(conn)
            schedule_rows.plan_again(conn, now, whole=False)
        elif (self._seen - now).total_seconds() > CLOCK_STEP_S:
            schedule_rows.plan_again(conn, now, whole=True)

    def _store(self, rows: list[definition.Schedule]) -> None:
        with db.transaction() as conn:
            for row in sorted(rows, key=lambda one: one.name):
                try:
                    if schedule_rows.put(conn, row, "code"):
                        _log.info("schedule %r is stored", row.name)
                except errors.InvalidConfig as error:
                    _log.warning("%s", error)
            for name in schedule_rows.mark_gone(conn, (row.name for row in rows)):
                _log.warning("schedule %r is in the code no more: it does not fire", name)
        self._stored = rows

    def pause_s(self) -> float:
        """Return the seconds until the next schedule is due, at most LOOK_EVERY_S."""
        if self._seen is None or self._wake_at is None:
            return LOOK_EVERY_S
        due_in_s = (self._wake_at - self._seen).total_seconds()
        # What is due already is locked by another scheduler.
        least_s = WAIT_MIN_S if due_in_s > 0 else LOCKED_RETRY_S
        return min(LOOK_EVERY_S, max(least_s, due_in_s - (time.monotonic() - self._seen_at)))


class Ticker:
    """Fires what is due by the database's clock, and waits by the process's monotonic one.

    `schedule` None follows `set_ingest_schedule`, also when it changes. `now_fn` replaces the
    database's clock (a datetime), `sleep_fn` the waiting, which `stop()` then does not interrupt.
    """

    def __init__(
        self,
        *,
        schedule: Iterable[ScheduleEntry] | None = None,
        now_fn: Callable[[], datetime] | None = None,
        sleep_fn: types.SleepFn | None = None,
    ) -> None:
        self._schedule = None if schedule is None else [*schedule]
        follows_rows = schedule is None or bool(plan.split(self._schedule or ())[1])
        self._stopping = signals.Flag()
        self._rows_ticker = _RowsTicker(now_fn, self._stopping.is_set) if follows_rows else None
        self._now = now_fn
        self._custom_sleep = sleep_fn is not None
        self._listener: db.Listener | None = None
        self._sleep: Callable[[float], object] = sleep_fn or self._stopping.wait
        self._seen: datetime | None = None
        self._seen_at = 0.0
        self._warned: set[str] = set()
        self._failures = 0
        self._rows = row_isolation.Isolation()
        self._late: list[plan.Fire] = []
        """Fires that raised; see `_fire_apart`."""

    def stop(self) -> None:
        """Stop `run_forever` soon; callable from any thread or signal handler."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.close()

    def run_once(self) -> list[str]:
        """Fire what has come due since the last call; return the ids of the queued jobs.

        The first call, and one that finds the clock set back, goes back to each entry's last fire;
        one that never fired starts now. What an outage left: `schedule.plan.missed`. One
        transaction. Database errors pass, with the stretch left for the next call.
        """
        ids: list[str] = []
        old, new = plan.split(self._configured())
        if self._rows_ticker is not None:
            ids += self._rows_ticker.run_once(new, synchronize=self._schedule is None or bool(new))
        entries = self._entries(old)
        return ids + self._run_entries(entries) if entries else ids

    def _configured(self) -> list[Any]:
        return config.get_config().ingest_schedule if self._schedule is None else self._schedule

    def _run_entries(self, entries: list[ScheduleEntry]) -> list[str]:
        with db.transaction() as conn:
            seen_at = time.monotonic()
            now = schedule_entry.as_utc(self._now() if self._now else schedules.database_now(conn))
            due = plan.missed(entries, self._since(conn, entries, now), now)
        oldest = now - timedelta(seconds=plan.CATCH_UP_S)
        self._late = [fire for fire in self._late if fire[1] >= oldest]
        ids = self._fire_apart(due)
        self._seen, self._seen_at = now, seen_at
        return ids

    def _fire_apart(self, due: list[plan.Fire]) -> list[str]:
        """Fire in one transaction; if it raises, each in its own; retry those that fail later.

        A fire that was set aside is tried again until it is too old to catch up with.
        """
        again = [fire for fire in self._late if fire not in due]
        if due and not again:
            try:
                with db.transaction() as conn:
                    return _fire(conn, due, "tick")
            except db.Error as error:
                if not row_isolation.is_of_row(error):
                    raise
        aside = set(self._rows.aside(FIRE))
        self._late, ids = [], list[str]()
        for fire in sorted([*again, *due], key=plan.order):
            name = f"{fire[0].name} at {fire[1].isoformat()}"
            done = None
            if name not in aside:
                done = self._rows.attempt(FIRE, name, lambda fire=fire: _fire_one(fire))
            if done is None:
                self._late.append(fire)
            ids += done or ()
        return ids

    def run_forever(self) -> None:
        """Call `run_once` at every due instant until `stop()`; wait while the database is away.

        A change of the table `schedules` wakes it, unless `sleep_fn` replaces the waiting.
        """
        if self._custom_sleep or self._rows_ticker is None:
            while not self._stopping.is_set():
                self._sleep(self._step_s())
            return
        self._pause_now_s = 0.0
        self._listener = db.listen(schedule_rows.CHANNEL, poll_s=lambda: self._pause_now_s)
        if self._stopping.is_set():
            return
        for _ in self._listener:
            self._pause_now_s = self._step_s()

    def _step_s(self) -> float:
        """Call `run_once`; return how many seconds to wait then."""
        try:
            self.run_once()
        except _DATABASE_ERRORS as error:
            if not self._failures:
                _log.warning(
                    "the schedule waits for the database: %s", entry_point.mask(str(error))
                )
            longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
            self._failures += 1
            return longest * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        if self._failures:
            _log.warning("the schedule goes on")
        self._failures = 0
        return self._pause_s()

    def _entries(self, entries: list[ScheduleEntry]) -> list[ScheduleEntry]:
        usable: list[ScheduleEntry] = []
        if not entries and not (self._rows_ticker and self._rows_ticker.has_rows):
            self._warn_once(
                "the schedule is empty, waiting: set_ingest_schedule([ScheduleEntry(...)]) in the "
                "app (--app) fills it"
            )
        for entry in entries:
            try:
                usable += _checked_jobs([entry])
            except (errors.UnknownQueue, errors.UnknownTask) as error:
                self._warn_once(f"schedule entry {entry.name!r} is left out: {error}")
        return usable

    def _since(
        self, conn: db.Connection, entries: list[ScheduleEntry], now: datetime
    ) -> datetime | Mapping[str, datetime]:
        if self._seen is not None and now >= self._seen:
            return self._seen
        if self._seen is not None:
            behind_s = (self._seen - now).total_seconds()
            _log.warning("the clock went back by %.1f s; nothing is fired twice", behind_s)
        return schedules.last_fires(conn, [entry.name for entry in entries], until=now)

    def _pause_s(self) -> float:
        rows_s = LOOK_EVERY_S if self._rows_ticker is None else self._rows_ticker.pause_s()
        return min(rows_s, self._pause_for_entries_s())

    def _pause_for_entries_s(self) -> float:
        if self._seen is None:
            return LOOK_EVERY_S
        wake = plan.next_wake(plan.split(self._configured())[0], self._seen)
        if wake is None:
            return LOOK_EVERY_S
        elapsed_s = time.monotonic() - self._seen_at
        due_in_s = (wake - self._seen).total_seconds() - elapsed_s
        return min(LOOK_EVERY_S, max(WAIT_MIN_S, due_in_s))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ticker until SIGTERM or SIGINT; the exit code: 0, or 2 for input it refuses."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=PROG,
        description="Queue ingest jobs at the minutes that the app's schedule names.",
    )
    entry_point.add_common_arguments(parser)
    parser.add_argument(
        "--boot-kick", action="store_true", help="queue every entry once at start (reason: boot)"
    )
    args = parser.parse_args(argv)
    return entry_point.run_main(PROG, lambda: _serve(args), debug=args.debug)


def _serve(args: argparse.Namespace) -> int:
    entry_point.setup_logging(args.log_level)
    if args.embedded:
        config.configure(embedded=True)
    config.load_app(args.app)
    old, new = plan.split(config.get_config().ingest_schedule)
    entries = [*_checked_jobs(old), *new]
    ticker = Ticker()
    with signals.StopRequest(on_first=ticker.stop) as stop:
        if not db.wait_until_ready(stopped=stop.requested.is_set, pause=stop.requested.wait):
            return 0
        if entries:
            _log.info("following %d schedule entries", len(entries))
        if args.boot_kick:
            _boot_kick()
        ticker.run_forever()
    return 0


def _boot_kick() -> None:
    try:
        _log.info("boot kick: %d jobs queued", len(enqueue_boot_kick()))
    except _DATABASE_ERRORS as error:
        _log.error("boot kick left out: %s", entry_point.mask(str(error)))


if __name__ == "__main__":
    sys.exit(main())
