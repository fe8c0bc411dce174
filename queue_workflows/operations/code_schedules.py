"""Store the schedules that an app's code names as rows, and queue old-style entries at boot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

from queue_workflows import config, db, errors, tasks
from queue_workflows.db import statements
from queue_workflows.engine import (
    row_isolation,
    schedule_definitions,
    schedule_fires,
    schedule_rows,
)
from queue_workflows.runtime import app_loading
from queue_workflows.schedule import definition, entry, old_style_entries

T = TypeVar("T")
STORED_AT_ONCE = 50
"""How many schedules one transaction stores."""
RETRY_S = 30.0
"""Seconds after which names that another app has, and unknown tasks, are tried again."""
_log = logging.getLogger("queue_workflows.scheduler")


def check_entries(entries: list[entry.ScheduleEntry]) -> list[entry.ScheduleEntry]:
    """Return the entries; raise for a queue or a task that this process does not know."""
    for one in entries:
        config.check_queue(one.queue, config.get_config().ingest_queues)
        known = config.get_config().ingest_task_map
        if one.task_name not in known:
            raise errors.UnknownTask(
                f"schedule entry {one.name!r}: no ingest task {one.task_name!r}, registered "
                f"are {', '.join(sorted(known)) or 'none'}; register_ingest_task() in the app "
                f"(--app) adds it{errors.hint(one.task_name, known)}"
            )
        try:
            tasks.check_args(one.task_name, {})
        except errors.ArgsRefused as error:
            raise errors.ArgsRefused(
                f"schedule entry {one.name!r}: it sends no args, and {error}"
            ) from None
    return entries


class CodeSchedules:
    """The schedules of one ticker's code, and what it has stored of them.

    `given` None follows `set_ingest_schedule`; only then are schedules marked that the app's code
    does not name any more.
    """

    def __init__(self, given: list[Any] | None, now_fn: Callable[[], datetime] | None) -> None:
        self._given = given
        self._clock = now_fn
        self._seen: list[Any] | None = None
        self._old: list[definition.Schedule] = []
        self._new: list[definition.Schedule] = []
        self._left_out: set[str] = set()
        self._retry_at: float | None = None
        self._logged: set[str] = set()

    def is_empty(self) -> bool:
        """Return whether the code names no schedule."""
        return not (self._old or self._new)

    def scope(self) -> schedule_rows.Scope:
        """Return which schedules this process fires."""
        names = None if self._given is None else [one.name for one in (*self._old, *self._new)]
        known = [*config.get_config().ingest_task_map]
        return schedule_rows.Scope(app_loading.app_name(), known, names)

    def store(self) -> None:
        """Store what the code names, if that has changed, and mark what it names no more."""
        chosen = config.get_config().ingest_schedule if self._given is None else self._given
        is_due = self._retry_at is not None and time.monotonic() >= self._retry_at
        # Lists are equal fast where they hold the same objects.
        if chosen == self._seen and not is_due:
            return
        self._seen, self._retry_at = None, None
        seen = [*chosen]
        self._split(seen)
        app = app_loading.app_name()
        refused = self._put(app)
        with db.transaction() as conn:
            statements.schedule_definitions.end_clashes(conn, app=app, names=[*refused])
            if self._given is None and (seen or app_loading.names_app()):
                kept = {one.name for one in (*self._old, *self._new)} | self._left_out
                for name in statements.schedule_definitions.mark_gone(
                    conn, app=app, names=sorted(kept)
                ):
                    _log.warning("schedule %r is in the code no more: it does not fire", name)
        if refused or self._left_out:
            self._retry_at = time.monotonic() + RETRY_S
        self._seen = seen

    def _split(self, chosen: list[Any]) -> None:
        old, new = old_style_entries.split(chosen)
        usable: list[entry.ScheduleEntry] = []
        self._left_out, self._new = set(), []
        for one in old:
            try:
                usable += check_entries([one])
            except (errors.UnknownQueue, errors.UnknownTask) as error:
                self._left_out.add(one.name)
                self._log_once(f"schedule entry {one.name!r} is left out: {error}")
        self._old = old_style_entries.converted(usable)
        for one in new:
            try:
                schedule_definitions.encoded(one)
                self._new.append(one)
            except errors.QueueWorkflowsError as error:
                self._left_out.add(one.name)
                self._log_once(f"schedule {one.name!r} is left out: {error}")

    def _put(self, app: str) -> list[str]:
        """Store what differs; return the names that the table or another app has."""
        with db.transaction() as conn:
            known = {
                row["name"]: row["definition_hash"]
                for row in statements.schedule_definitions.stored(conn, app=app)
            }
        wanted = [(one, True) for one in self._old] + [(one, False) for one in self._new]
        changed = [
            found for found in wanted
            if known.get(found[0].name) != schedule_definitions.encoded(found[0])[1]
        ]  # fmt: skip
        refused: list[str] = []
        # In one order, so that schedulers that start together cannot deadlock.
        for part in _parts(sorted(changed, key=lambda found: found[0].name), STORED_AT_ONCE):
            with db.transaction() as conn:
                for one, is_old in part:
                    if not self._put_one(conn, one, app, is_old=is_old):
                        refused.append(one.name)
        return refused

    def _put_one(
        self, conn: db.Connection, one: definition.Schedule, app: str, *, is_old: bool
    ) -> bool:
        try:
            with conn.transaction():
                found = schedule_definitions.put(conn, one, app)
        except db.Error as error:
            if not row_isolation.is_of_row(error):
                raise
            self._left_out.add(one.name)
            self._log_once(f"schedule {one.name!r} is left out: {row_isolation.described(error)}")
            return True
        except errors.InvalidConfig as error:
            statements.schedule_definitions.clash(conn, name=one.name, app=app)
            self._log_once(f"{error}; until then it does not fire for app {app!r}")
            return False
        if found is not None:
            _log.info("schedule %r is stored", one.name)
            if self._clock is not None:
                statements.schedule_definitions.begin(conn, name=one.name, now=self._now(conn))
            if is_old and found["inserted"]:
                statements.schedule_definitions.adopt(conn, name=one.name, now=self._now(conn))
        return True

    def boot(self) -> list[str]:
        """Queue each old-style entry of which nothing was queued within its period.

        Returns the ids of the jobs. Entries whose task name contains `freshness` are left out, as
        are paused ones. Several schedulers that start together queue one job.
        """
        app, ids = app_loading.app_name(), list[str]()
        names = sorted(one.name for one in self._old if "freshness" not in (one.task_name or ""))
        for part in _parts(names, schedule_rows.BATCH):
            with db.transaction() as conn:
                now = self._now(conn)
                rows = [statements.schedule_definitions.lock(conn, name=name) for name in part]
                kicked = [
                    schedule_fires.boot(conn, row, now)
                    for row in rows
                    if row is not None and row["app"] == app
                ]
            ids += [made for made in kicked if made is not None]
        if ids:
            _log.info("boot kick: %d jobs queued", len(ids))
        return ids

    def _now(self, conn: db.Connection) -> datetime:
        return entry.as_utc(self._clock() if self._clock else statements.schedules.now(conn))

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("%s", text)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
