"""Set the entries that the scheduler follows, and list them with their instants."""

from __future__ import annotations

from collections.abc import Iterable

from queue_workflows import config, db
from queue_workflows.engine import schedules
from queue_workflows.schedule import entry, plan
from queue_workflows.types import Rows

ScheduleEntry = entry.ScheduleEntry


def set(entries: Iterable[ScheduleEntry]) -> None:  # noqa: A001  the verb that users look for
    """Replace the entries that the scheduler of this process follows.

    Raises `InvalidConfig` (a ValueError), with nothing replaced, for what is no `ScheduleEntry`,
    and for two entries of one name that fire at the same instants but queue different jobs.
    """
    config.set_ingest_schedule(plan.check(entries))


def list(*, conn: db.Connection | None = None) -> Rows:  # noqa: A001  the verb that users look for
    """Return the entries of this process, the next to fire first.

    `name`, `task_name`, `queue`, `minute`, `hours` (sorted; None: every hour), `next_fire_at` by
    the database's clock, and `last_fire_at`: the last instant that a scheduler fired, or None.
    """
    entries = plan.check(config.get_config().ingest_schedule)
    with db.transaction(conn) as own:
        now = schedules.database_now(own)
        last = schedules.last_fires(own, [one.name for one in entries], until=now)
    rows = [
        {
            "name": one.name,
            "task_name": one.task_name,
            "queue": one.queue,
            "minute": one.minute,
            "hours": None if one.hours is None else sorted(one.hours),
            "next_fire_at": one.next_fire_at(now),
            "last_fire_at": last.get(one.name),
        }
        for one in entries
    ]
    return sorted(rows, key=lambda row: (row["next_fire_at"], row["name"]))
