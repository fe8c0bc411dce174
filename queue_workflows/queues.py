"""Pause, resume, limit and list queues, with their depth, age, rates and state."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from queue_workflows import acts, config, db, errors
from queue_workflows.dag import payload
from queue_workflows.db import check_violations, statements
from queue_workflows.runtime import clock
from queue_workflows.tasks import job_validation
from queue_workflows.types import Row, Rows, Who

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RATE = re.compile(r"([0-9]{1,9})/((?:[0-9]{1,9}(?:\.[0-9]{1,6})?)?)(s|m|h|d)")
MOST = 1_000_000
"""The largest limit of jobs at once, or of starts in a period."""
LONGEST_S = 366 * 86400.0
LIVE_WORKER_S = 30.0
"""Heartbeat age in seconds up to which a worker counts as capacity."""
RATE_WINDOW_S = 300
"""Seconds over which rates are measured."""
PARTITIONS: Final = 1_000
"""The most partitions with settings of their own that `list` returns, in order of their queues."""
PARTITIONS_OF_ONE: Final = 9_999
"""The most partitions that `get` returns."""


class _Keep(Enum):
    KEEP = "as it is"


KEEP: Final = _Keep.KEEP
"""Leave this limit unchanged."""


@check_violations.translated()
def pause(
    queue: str,
    *,
    partition: str | None = None,
    until: datetime | timedelta | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> Row:
    """Stop claims of a queue, or of one partition of an ingest queue; return its settings row.

    Running jobs continue. `until`: when the pause ends by itself, a time with a time zone or a span
    from now by the database's clock; by default at `resume`. `by`, `reason`: who does it and why,
    for the record, see `acts`. `conn`: join the caller's transaction. Raises before any write
    `UnknownQueue`, `InvalidConfig` (both ValueErrors).
    """
    at, lasts = clock.check_until(until)
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        if at is not None and statements.controls.is_over(own, instant=at):
            raise errors.InvalidConfig(
                f"until {at}: that is over by the database's clock; name a time to come, or a time "
                "span from now"
            )
        subject = ("queue", queue)
        with acts.recorded(own, "pause", subject, **who, partition=partition) as act:
            given: dict[str, Any] = {"queue": queue, "at": at, "lasts": lasts, "by": act.actor}
            if partition is None:
                row = statements.queues.pause_queue(own, **given)
            else:
                row = statements.queues.pause_partition(own, partition=partition, **given)
            act.detail["until"] = row["paused_until"]
            return row


def resume(
    queue: str,
    *,
    partition: str | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> bool:
    """Resume a paused queue and wake its workers; return False if it was not paused.

    `by`, `reason`: as in `pause`.
    """
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        subject = ("queue", queue)
        with acts.recorded(own, "resume", subject, **who, partition=partition) as act:
            if partition is None:
                resumed = statements.queues.resume_queue(own, queue=queue)
            else:
                resumed = statements.queues.resume_partition(own, queue=queue, partition=partition)
                statements.queues.delete_unset_partition(own, queue=queue, partition=partition)
            if not resumed:
                act.subjects.clear()
            return bool(resumed)


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
    **who: Unpack[Who],
) -> Row:
    """Limit an ingest queue, or one `partition` of it; return its row. None removes a limit.

    `max_running`: jobs at once. `rate`: starts in any period, `N/PERIOD`: `100/m`, `5/30s`, `1/d`.
    `partition_max_running`, `partition_rate`: of each partition key of the queue that has no limit
    of its own. Running jobs continue. `by`, `reason`: as in `pause`. Raises before any write
    `UnknownQueue`, `InvalidConfig`.
    """
    values = _limits(max_running, rate, "")
    values |= _limits(partition_max_running, partition_rate, "partition_")
    if partition is not None and any(name.startswith("partition_") for name in values):
        raise errors.InvalidConfig(
            f"the limits of partition {partition!r:.80} are max_running and rate: leave out "
            "partition_max_running and partition_rate"
        )
    if not values:
        raise errors.InvalidConfig(
            "no limit is given: pass max_running, rate, partition_max_running or partition_rate"
        )
    with db.transaction(conn) as own:
        _check(own, queue, partition)
        if queue in config.DAG_QUEUES:
            raise errors.InvalidConfig(
                f"queue {queue!r} takes no limits, as only ingest queues do; it can be paused"
            )
        given: dict[str, Any] = {"queue": queue, "limits": json.dumps(values)}
        detail: dict[str, Any] = {"partition": partition, "limits": values}
        with acts.recorded(own, "limit", ("queue", queue), **who, **detail):
            if partition is None:
                return statements.queues.limit_queue(own, **given)
            row = statements.queues.limit_partition(own, partition=partition, **given)
            statements.queues.delete_unset_partition(own, queue=queue, partition=partition)
            return row


def list(*, used_only: bool = False, conn: db.Connection | None = None) -> Rows:  # noqa: A001
    """Return the queues that are configured, have live or recent jobs, or settings, by name.

    `used_only`: without default ingest queues that neither the app nor a job, setting, worker or
    switch uses. Keys: `queue`, `state` (open or paused), `paused_until`, `paused_by`; jobs
    `running`, `ready`, `limited`, `locked`, `not_due`; `oldest_s`: age of the oldest due one;
    `in_per_min`, `out_per_min`: over five minutes; `max_running`, `rate`, `partition_max_running`,
    `partition_rate`; `partitions` with settings of their own, in all PARTITIONS: each `partition`,
    `state`, `paused_until`, `paused_by`, `max_running`, `rate`.
    """
    with db.transaction(conn) as own:
        found = _read(own, served=used_only, most=PARTITIONS)
    named = config.used_queues() if used_only else config.queues()
    return [found.get(name) or _shown(name, {}) for name in sorted(named | found.keys())]


def get(queue: str, *, conn: db.Connection | None = None) -> Row:
    """Return one queue as `list` returns it; a queue without jobs or settings has zeros.

    It has the first PARTITIONS_OF_ONE of its partitions. Raises `UnknownQueue` (a ValueError) for a
    queue that is not configured, has never been served and is empty.
    """
    _check_name(queue)
    with db.transaction(conn) as own:
        found = _read(own, queue=queue, most=PARTITIONS_OF_ONE)
        if queue not in found:
            _check(own, queue, None)
    return found.get(queue) or _shown(queue, {})


def running_and_queued() -> dict[str, Any]:
    """Return at most 50 running and 50 queued node jobs of each of cpu and gpu, and their counts.

    `{"cpu": {"running": rows, "queued": rows}, "gpu": {...}, "counts": {"cpu_queued": n, ...}}`.
    """
    own, queues, states = statements.overview, ("cpu", "gpu"), ("running", "queued")
    with db.transaction() as conn:
        found: dict[str, Any] = {
            queue: {
                status: own.listed_nodes(conn, queue=queue, status=status, limit=50)
                for status in states
            }
            for queue in queues
        }
        counts = {f"{queue}_{status}": 0 for queue in queues for status in reversed(states)}
        counts |= {f"{row['queue']}_{row['status']}": row["n"] for row in own.live_nodes(conn)}
    return found | {"counts": counts}


def ingest_counts() -> dict[str, Any]:
    """Return `{"queues": {q: {"queued", "running", "completed", "failed", "workers"}}}`.

    For every configured ingest queue. `workers`: heartbeats younger than LIVE_WORKER_S seconds.
    """
    keys = ("queued", "running", "completed", "failed", "workers")
    queues = sorted(config.get_config().ingest_queues)
    found: dict[str, dict[str, int]] = {queue: dict.fromkeys(keys, 0) for queue in queues}
    with db.transaction() as conn:
        counts = statements.ingest_jobs.count_by_status(conn)
        live = statements.workers.count_heartbeats(conn, live_s=LIVE_WORKER_S)
    for row in counts:
        of_queue = found.get(row["queue"], {})
        if row["status"] in of_queue:
            of_queue[row["status"]] = row["n"]
    for row in live:
        if row["queue"] in found:
            found[row["queue"]]["workers"] = row["n"]
    return {"queues": found}


def _read(
    conn: db.Connection, *, most: int, served: bool = False, queue: str | None = None
) -> dict[str, Row]:
    """Return queues as `list` does, by name; see the statement for the arguments."""
    rows = statements.queues.list(
        conn, window=RATE_WINDOW_S, stale_s=config.STALE_WORKER_AFTER_S.read(), served=served,
        queue=queue, most=most,
    )  # fmt: skip
    found: dict[str, Row] = {}
    for row in rows:
        if row["partition"] is None:
            found[row["queue"]] = _shown(row["queue"], row)
        else:
            found[row["queue"]]["partitions"].append(_partition(row))
    return found


def _shown(queue: str, row: Row) -> Row:
    """Return a queue as `list` does; `row` is its row of the statement, or empty."""
    per_min = 60 / RATE_WINDOW_S
    return {
        "queue": queue,
        **_state(row),
        **{name: row.get(name, 0) for name in ("running", "ready", "limited", "locked", "not_due")},
        "oldest_s": row.get("oldest_s"),
        "in_per_min": round(row.get("came", 0) * per_min, 1),
        "out_per_min": round(row.get("went", 0) * per_min, 1),
        "max_running": row.get("max_running"),
        "rate": clock.rate_text(row.get("rate_limit"), row.get("rate_period_s")),
        "partition_max_running": row.get("partition_max_running"),
        "partition_rate": clock.rate_text(
            row.get("partition_rate_limit"), row.get("partition_rate_period_s")
        ),
        "partitions": [],
    }


def _partition(row: Row) -> Row:
    return {
        "partition": row["partition"],
        **_state(row),
        "max_running": row["max_running"],
        "rate": clock.rate_text(row["rate_limit"], row["rate_period_s"]),
    }


def _state(row: Row) -> Row:
    paused = bool(row.get("paused"))
    return {
        "state": "paused" if paused else "open",
        "paused_until": row["paused_until"] if paused else None,
        "paused_by": row["paused_by"] if paused else None,
    }


def _limits(most: Any, rate: Any, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if most is not KEEP:
        if most is not None and (type(most) is not int or not 1 <= most <= MOST):
            raise errors.InvalidConfig(
                f"{prefix}max_running must be a whole number from 1 to {MOST:,}, or None, not "
                f"{most!r:.40}"
            )
        values[f"{prefix}max_running"] = most
    if rate is not KEEP:
        count, period_s = (None, None) if rate is None else _rate(rate, prefix)
        values |= {f"{prefix}rate_limit": count, f"{prefix}rate_period_s": period_s}
    return values


def _rate(text: Any, prefix: str) -> tuple[int, float]:
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        count, period_s = int(match[1]), float(match[2] or 1) * clock.UNITS_S[match[3]]
        if 1 <= count <= MOST and 0 < period_s <= LONGEST_S:
            return count, period_s
    raise errors.InvalidConfig(
        f"{prefix}rate {text!r:.40} should look like N/PERIOD, such as 100/m, 5/30s or 1/d"
    )


def _check_name(queue: str) -> None:
    if not isinstance(queue, str) or not payload.is_storable(queue):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UnknownQueue(f"the name of a queue is a text without NUL, not {queue!r:.80}")


def _check(conn: db.Connection, queue: str, partition: str | None) -> None:
    _check_name(queue)
    known = config.queues() | {*statements.controls.known_queues(conn)}
    if queue not in known and not bool(statements.queues.is_used(conn, queue=queue)):
        raise errors.UnknownQueue(
            f"queue {queue!r}: not configured, never served, and empty; known are "
            f"{', '.join(sorted(known))}, and --app adds those of an app"
            f"{errors.hint(queue, known)}"
        )
    if partition is None:
        return
    if queue in config.DAG_QUEUES:
        raise errors.InvalidConfig(f"queue {queue!r} has no partitions: only ingest queues have")
    fits = isinstance(partition, str) and payload.is_storable(partition)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not fits or not 1 <= len(partition.encode()) <= job_validation.MAX_KEY_BYTES:
        raise errors.InvalidConfig(
            f"partition {partition!r:.80}: a key has 1 to {job_validation.MAX_KEY_BYTES:,} bytes "
            "of UTF-8"
        )
