"""Queues: pausing them, limits of what runs at once or starts in any period, and how they stand."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Final

from queue_workflows import config, db, errors
from queue_workflows.dag import payload
from queue_workflows.db import check_violations
from queue_workflows.engine import controls, queues
from queue_workflows.runtime import durations
from queue_workflows.tasks import job_options
from queue_workflows.types import Row

_RATE = re.compile(r"([0-9]{1,9})/((?:[0-9]{1,9}(?:\.[0-9]{1,6})?)?)(s|m|h|d)")
MOST = 1_000_000
"""The largest limit, of jobs at once or of starts in a period."""
LONGEST_S = 366 * 86400.0


class _Keep(Enum):
    KEEP = "as it is"


KEEP: Final = _Keep.KEEP
"""A limit that is left as it is."""


@check_violations.translated()
def pause(
    queue: str,
    *,
    partition: str | None = None,
    until: datetime | timedelta | None = None,
    requested_by: str | None = None,
    conn: db.Connection | None = None,
) -> Row:
    """Let nothing more of a queue (of an ingest queue's partition) be claimed; its row.

    What runs, runs on. `until`: when the pause ends by itself, a time with a time zone or how long
    from now by the database's clock; None: at `resume`. `conn`: join the caller's transaction.
    Raises before any write `UnknownQueue`, `InvalidConfig` (both ValueErrors).
    """
    at, lasts = moment(until)
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        if at is not None and controls.is_over(own, at):
            raise errors.InvalidConfig(f"until {at}: that is over by the database's clock")
        by = None if requested_by is None else payload.error_text(requested_by)
        return queues.pause(own, queue, partition, {"at": at, "lasts": lasts, "by": by})


def resume(queue: str, *, partition: str | None = None, conn: db.Connection | None = None) -> bool:
    """End a pause, which wakes the queue's workers; False: it was not paused."""
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        return queues.resume(own, queue, partition)


@check_violations.translated()
def limit(
    queue: str,
    *,
    partition: str | None = None,
    max_running: int | _Keep | None = KEEP,
    rate: str | _Keep | None = KEEP,
    partition_max_running: int | _Keep | None = KEEP,
    partition_rate: str | _Keep | None = KEEP,
    conn: db.Connection | None = None,
) -> Row:
    """Limit an ingest queue, or one `partition` of it; the row. None takes a limit off.

    `max_running`: jobs at once. `rate`: starts in any period, `N/PERIOD`: `100/m`, `5/30s`, `1/d`.
    `partition_max_running`, `partition_rate`: of each partition key of the queue that has no limit
    of its own. What runs, runs on. Raises before any write `UnknownQueue`, `InvalidConfig`.
    """
    values = _limits(max_running, rate, "")
    values |= _limits(partition_max_running, partition_rate, "partition_")
    if partition is not None and any(name.startswith("partition_") for name in values):
        raise errors.InvalidConfig("one partition takes max_running and rate")
    if not values:
        raise errors.InvalidConfig("no limit is given: name max_running, rate, or a partition_ one")
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        if queue in config.DAG_QUEUES:
            raise errors.InvalidConfig(
                f"queue {queue!r} can be paused; limits are of ingest queues"
            )
        return queues.limit(own, queue, partition, values)


def show(*, used_only: bool = False, conn: db.Connection | None = None) -> list[Row]:
    """How queues stand: those that are configured, have live or recent jobs, or settings.

    `used_only`: those that the app has a use for or the database knows: by jobs, settings, workers
    or switches. The default ingest queues of an app without tasks are left out.

    `queue`, `state` (open or paused), `paused_until`, `paused_by`; jobs `running`, `ready`,
    `limited`, `locked`, `not_due`; `oldest_s`: age of the oldest that is due; `in_per_min`,
    `out_per_min`: over the last five minutes; `max_running`, `rate`, `partition_max_running`,
    `partition_rate`; `partitions`: those with settings of their own, each `partition`, `state`,
    `paused_until`, `paused_by`, `max_running`, `rate`.
    """
    with db.transaction(conn) as own:
        said = {row["queue"]: row for row in queues.settings(own)}
        counts = queues.counts(own)
        parts = queues.partition_settings(own)
        served = {*controls.known_queues(own)} - {"all"} if used_only else config.queues()
    named = config.used_queues() | served if used_only else served
    names = sorted(named | said.keys() | counts.keys())
    return [
        _shown(name, said.get(name, {}), counts.get(name, {}))
        | {"partitions": [_partition(row) for row in parts if row["queue"] == name]}
        for name in names
    ]


def _shown(queue: str, said: Row, count: Row) -> Row:
    per_min = 60 / queues.RATE_WINDOW_S
    came = count.get("fresh", 0) + count.get("came", 0)
    return {
        "queue": queue,
        **_state(said),
        **{
            name: count.get(name, 0)
            for name in ("running", "ready", "limited", "locked", "not_due")
        },
        "oldest_s": count.get("oldest_s"),
        "in_per_min": round(came * per_min, 1),
        "out_per_min": round(count.get("went", 0) * per_min, 1),
        "max_running": said.get("max_running"),
        "rate": durations.rate_text(said.get("rate_limit"), said.get("rate_period_s")),
        "partition_max_running": said.get("partition_max_running"),
        "partition_rate": durations.rate_text(
            said.get("partition_rate_limit"), said.get("partition_rate_period_s")
        ),
    }


def _partition(row: Row) -> Row:
    return {
        "partition": row["partition_key"],
        **_state(row),
        "max_running": row["max_running"],
        "rate": durations.rate_text(row["rate_limit"], row["rate_period_s"]),
    }


def _state(row: Row) -> Row:
    paused = bool(row.get("paused"))
    return {
        "state": "paused" if paused else "open",
        "paused_until": row["paused_until"] if paused else None,
        "paused_by": row["paused_by"] if paused else None,
    }


def moment(until: Any) -> tuple[datetime | None, timedelta | None]:
    """An `until` as a time or as how long from now; both None: none. Raises `InvalidConfig`."""
    if until is not None and not isinstance(until, (datetime, timedelta)):
        raise errors.InvalidConfig(
            f"until {until!r:.40}: a datetime or a timedelta; when() reads text"
        )
    lasts = until if isinstance(until, timedelta) else None
    at = until if isinstance(until, datetime) else None
    if (at is not None and at.tzinfo is None) or (
        lasts is not None and not timedelta(0) < lasts <= durations.MAX_SPAN
    ):
        raise errors.InvalidConfig(
            f"until {str(until)[:40]}: a time with a time zone, or a time span above zero and of a "
            "hundred years at most"
        )
    return at, lasts


def when(text: str) -> datetime | timedelta:
    """What `until` may be, as text: a time span such as 30s, 45m, 2h, 1d, or an ISO time."""
    seconds = durations.UNITS_S.get(text[-1:])
    try:
        if seconds is not None:
            return timedelta(seconds=seconds * float(text[:-1]))
        # Python 3.10 knows no Z.
        return datetime.fromisoformat(text.removesuffix("Z") + "+00:00" * text.endswith("Z"))
    except (ValueError, OverflowError):
        raise errors.InvalidConfig(
            f"{text!r} is neither a time span such as 45m nor an ISO time"
        ) from None


def _limits(most: Any, rate: Any, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if most is not KEEP:
        if most is not None and (type(most) is not int or not 1 <= most <= MOST):
            raise errors.InvalidConfig(f"{prefix}max_running {most!r}: a whole number from 1")
        values[f"{prefix}max_running"] = most
    if rate is not KEEP:
        count, period_s = (None, None) if rate is None else _rate(rate, prefix)
        values |= {f"{prefix}rate_limit": count, f"{prefix}rate_period_s": period_s}
    return values


def _rate(text: Any, prefix: str) -> tuple[int, float]:
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        count, period_s = int(match[1]), float(match[2] or 1) * durations.UNITS_S[match[3]]
        if 1 <= count <= MOST and 0 < period_s <= LONGEST_S:
            return count, period_s
    raise errors.InvalidConfig(
        f"{prefix}rate {str(text)[:40]!r}: N/PERIOD such as 100/m, 5/30s or 1/d"
    )


def _check(conn: db.Connection, queue: str, partition: str | None) -> None:
    if not isinstance(queue, str) or not payload.is_storable(queue):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UnknownQueue(f"queue {queue!r:.80} is no name")
    known = config.queues() | set(controls.known_queues(conn))
    if queue not in known and not queues.is_used(conn, queue):
        raise errors.UnknownQueue(
            f"queue {queue!r}: not configured, never served, and empty; known are "
            f"{', '.join(sorted(known))}, and --app names those of a host app"
        )
    if partition is None:
        return
    if queue in config.DAG_QUEUES:
        raise errors.InvalidConfig(f"queue {queue!r}: partitions are of ingest queues")
    if not _is_key(partition):
        raise errors.InvalidConfig(
            f"partition {partition!r:.80}: a key has 1 to {job_options.MAX_KEY_BYTES:,} bytes of "
            "UTF-8"
        )


def _is_key(text: Any) -> bool:
    if not isinstance(text, str) or not payload.is_storable(text):
        return False
    return 1 <= len(text.encode()) <= job_options.MAX_KEY_BYTES
