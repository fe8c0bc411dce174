"""List workers, turn them on or off, drain them, and write or check their heartbeats."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import psycopg

from queue_workflows import acts, config, db, errors, types
from queue_workflows.db import check_violations, statements
from queue_workflows.runtime import clock, exit_codes, stored_json
from queue_workflows.types import ExitFn, Row, Rows, Who, WorkerControl

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)
STATES = ("on", "off")
ALL: Final = "all"
"""The queue of a control row that counts for every queue of its host."""
ABSENT = "absent"
"""The state of a queue that is switched off and has no live worker."""
_KEYS = (
    "worker_id", "host_label", "queue", "pid", "state", "desired_state", "current_model", "job_ids",
    "jobs", "started_at", "last_seen", "age_s", "stop_policy", "requested_by", "reason", "until_at",
    "until_s", "switched_at", "last_flagged_dead_at", "death", "throttle", "card",
)  # fmt: skip
_OBEYING = frozenset({"parked", "paused", "draining"})
TAKING: Final = frozenset({"idle", "busy", "throttled"})
"""The states of workers that take jobs, perhaps after a wait for memory or for a limit."""


# --- list --------------------------------------------------------------------------------------


def list(  # noqa: A001  the verb that users look for
    *, absent: bool = True, conn: db.Connection | None = None
) -> Rows:
    """Return the worker processes seen within a day; `absent`: also OFF switches without one.

    Keys: `worker_id`, `host_label`, `queue`, `pid`, `state` (idle, busy, throttled, draining,
    paused, parked, dead, absent), `desired_state`, `job_ids`, `jobs` (`id`, `kind`,
    `name`, `run_id`, `elapsed_s` of each), `current_model`, `last_seen`, `age_s`; the switch's
    `stop_policy`, `requested_by`, `reason`, `until_at`, `until_s`, `switched_at`; `death`: how a
    dead worker ended; `throttle`: the limit or the full memory for which it waits; `card`: the GPU
    that a worker of `--cards` uses, else None.
    """
    with db.transaction(conn) as own:
        rows = statements.workers.list(
            own, stale_s=config.STALE_WORKER_AFTER_S.read(), absent=absent
        )
    for row in rows:
        row["state"] = _state(row)
        row["throttle"] = _throttle(row)
        waits = row["state"] == "idle" and row["desired_state"] == "on"
        if waits and (cause := _limited(row["limits"])):
            row["state"], row["throttle"] = "throttled", cause
        row["card"] = stored_json.mapping(row["detail"]).get("card")
        row["death"] = _death(row["detail"]) if row["state"] == "dead" else None
    return [{key: row[key] for key in _KEYS} for row in rows]


def _limited(limits: Row | None) -> str | None:
    """Return in words why no due job of a queue may start now, or None.

    The reason is a pause, a limit of the queue, or the limits of its partitions.
    """
    if limits is None or not (limits["ready"] or limits["limited"]):
        return None
    if limits["paused"]:
        return "its queue is paused"
    if not limits["ready"]:
        return "limits of its partitions"
    if limits["max_running"] is not None and limits["running"] >= limits["max_running"]:
        return f"{limits['max_running']} at once"
    if limits["due_s"] is None:
        return None
    return clock.rate_text(limits["rate_limit"], limits["rate_period_s"])


def _state(row: Row) -> str:
    """Return the present state, in which a switch counts even before the worker's next report.

    A report after the switch decides, since a worker that ignores switches reports idle or busy.
    """
    state: str = row["state"]
    if state == "throttled" and row["job_ids"]:
        state = "busy"
    if state not in _OBEYING | {"idle", "busy"}:
        return state
    obeys = state in _OBEYING or row["switched_at"] is None or row["last_seen"] < row["switched_at"]
    if row["desired_state"] == "on" or not obeys:
        return "busy" if row["job_ids"] else "idle"
    if row["job_ids"]:
        return "draining"
    return "paused" if row["stop_policy"] == "pause" else "parked"


def _throttle(row: Row) -> str | None:
    """Return the name of the full memory that delays a worker, as it reported it, or None."""
    if row["state"] not in ("idle", "busy", "throttled"):
        return None
    return stored_json.text(stored_json.mapping(row["detail"]).get("throttle"))


def _death(detail: Any) -> str:
    """Return how a dead worker ended, as far as its parent saw it."""
    seen = stored_json.mapping(detail)
    number, code = seen.get("signal"), seen.get("exit_code")
    if number is not None:
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        return f"killed by {name}"
    return "no heartbeat" if code is None else f"ended with exit code {code}"


# --- how workers stop ---------------------------------------------------------------------------


class StoppableWorker(Protocol):
    """The part of a worker that a stop policy may read and call."""

    host: str
    queue: str

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running job to the front of its queue, counting nothing."""
        ...

    def clear_model(self) -> None:
        """Report that this host's model is unloaded."""
        ...


class StopPolicy(Protocol):
    """Stops a worker that was turned OFF."""

    def __call__(self, worker: Any, *, on_exit: ExitFn) -> None:
        """Stop `worker` (a `StoppableWorker`); `on_exit` leaves the process."""
        ...


def _hard(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Requeue the job, clear the model and exit; no other stop is sure to free RAM and VRAM."""
    try:
        worker.requeue_inflight_for_control()
        worker.clear_model()
    except db.Error as error:
        _log.warning("the job was not handed back, its lease brings it back: %s", error)
    on_exit(exit_codes.CONTROL)


def _finish(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Let the running job finish; while the row is OFF, no other job is claimed."""
    del worker, on_exit


HARD: StopPolicy = _hard
STOP_POLICIES: dict[str, StopPolicy] = {"hard": _hard, "drain": _finish, "pause": _finish}
"""Handlers by policy name; an app may add its own. `pause` keeps the model loaded."""


def app_stop_policies() -> dict[str, StopPolicy]:
    """Return the policies that the app has added, or with which it has replaced ours."""
    ours = _hard, _finish
    return {name: found for name, found in STOP_POLICIES.items() if found not in ours}


def stop_policy(name: str) -> StopPolicy:
    """Return the handler of a policy; for an unknown one log an error and return `hard`."""
    found = STOP_POLICIES.get(name)
    if found is None:
        _log.error("stop policy %r is not registered; stopping hard", name)
    return found or _hard


# --- turn on and off ---------------------------------------------------------------------------


@check_violations.translated()
def set_control(
    host: str,
    queue: str,
    *,
    desired_state: str,
    stop_policy: str = "hard",
    until: datetime | timedelta | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> WorkerControl:
    """Write the control row of a host and queue, which wakes its workers; return the row.

    The queue `all` stands for every queue of the host. `until`: when OFF ends by itself, a time
    with a time zone or a span from now by the database's clock. `by`, `reason`: who does it and
    why, see `acts`; the row has both too. `conn`: join the caller's transaction. Raises before any
    write `UnknownPolicy` (a ValueError) for a bad state, policy or name, `InvalidConfig` (a
    ValueError) for a bad `until`.
    """
    _check_states(desired_state, stop_policy)
    if until is not None and desired_state == "on":
        raise errors.InvalidConfig("until: it is the end of OFF, and has no meaning for ON")
    at, lasts = clock.check_until(until)
    _check_names(host, queue)
    values: dict[str, Any] = {
        "host": host,
        "queue": queue,
        "desired_state": desired_state,
        "stop_policy": stop_policy,
        "until": at,
        "lasts": lasts,
    }
    with db.transaction(conn) as own:
        if at is not None and statements.controls.is_over(own, instant=at):
            raise errors.InvalidConfig(
                f"until {at}: that is over by the database's clock; name a time to come, or a time "
                "span from now"
            )
        off = {"policy": stop_policy} if desired_state == "off" else {}
        subject = ("machine", host)
        with acts.recorded(own, desired_state, subject, **who, queue=queue, **off) as act:
            row = statements.controls.put(own, requested_by=act.actor, reason=act.reason, **values)
            act.detail["until"] = row["until_at"]
            return cast("WorkerControl", row)


def _check_states(desired_state: str, stop_policy: str) -> None:
    if desired_state not in STATES:
        raise errors.UnknownPolicy(f"desired_state {desired_state!r}: it is 'on' or 'off'")
    if stop_policy not in STOP_POLICIES:
        known = ", ".join(sorted(STOP_POLICIES))
        raise errors.UnknownPolicy(
            f"stop policy {stop_policy!r}: registered are {known}"
            f"{errors.hint(stop_policy, STOP_POLICIES)}"
        )


def _check_names(host: str, queue: str) -> None:
    for what, name, most in (("host", host, 400), ("queue", queue, 200)):
        if not types.is_name(name, most):
            raise errors.UnknownPolicy(
                f"{what} {name!r:.40}: a name has 1 to {most} bytes of UTF-8, and no NUL"
            )


def refuse_unknown(queue: str, *, host: str | None = None) -> None:
    """Raise `UnknownQueue` or `UnknownWorker` for a name that is probably a mistake.

    A queue is known if it is configured, a worker has served it, or a control row names it. A host
    is known if it has had a worker or a control row names it; None is not checked. `set_control`
    accepts unknown names, so that a machine can be switched before its first start.
    """
    with db.transaction() as conn:
        known = config.queues() | {ALL, *statements.controls.known_queues(conn)}
        hosts = [] if host is None else statements.controls.known_hosts(conn)
    if queue not in known:
        raise errors.UnknownQueue(
            f"queue {queue!r:.220}: no worker has ever served it; known are "
            f"{', '.join(sorted(known))}, and --app adds those of an app"
            f"{errors.hint(queue, known)}"
        )
    if host is not None and host not in hosts:
        raise errors.UnknownWorker(
            f"host {host!r:.420} has never had a worker; `queue-worker-control` switches a machine "
            f"before its first start{errors.hint(host, hosts)}"
        )


def get_control(host: str, queue: str) -> WorkerControl | None:
    """Return the control row of a host and queue; None without one, or without its table."""
    with db.transaction() as conn:
        try:
            with conn.transaction():
                row = statements.controls.get(conn, host=host, queue=queue)
        except psycopg.errors.UndefinedTable:
            return None
    return cast("WorkerControl | None", row)


def desired_state(host: str, queue: str) -> str:
    """Return the present state, `"on"` or `"off"`; without a control row `"on"`."""
    return "on" if policy_in_force(host, queue) is None else "off"


def policy_in_force(host: str, queue: str) -> str | None:
    """Return the policy by which workers of a host and queue must stop now; None if they are ON.

    It is None too in a database without the table of switches. A row of queue `all` counts for
    every queue of its host; if both are off, `hard` wins. Raises psycopg's `UndefinedFunction` if
    the schema lacks its functions, since an unknown state does not count as ON.
    """
    with db.transaction() as conn:
        try:
            with conn.transaction():
                return statements.controls.off_policy(conn, host=host, queue=queue)
        except psycopg.errors.UndefinedTable:
            return None
        except psycopg.errors.UndefinedFunction:
            if statements.sessions.has_table(conn, table="worker_controls"):
                raise
            return None


def enable(
    host: str, queue: str, *, conn: db.Connection | None = None, **who: Unpack[Who]
) -> WorkerControl:
    """Turn the workers of a host and queue ON; return the control row. Parked ones resume in place.

    ON for queue `all` lifts only that row: a queue with an OFF row of its own stays OFF.
    """
    return set_control(host, queue, desired_state="on", conn=conn, **who)


def disable(
    host: str,
    queue: str,
    *,
    stop_policy: str = "hard",
    until: datetime | timedelta | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> WorkerControl:
    """Turn the workers of a host and queue OFF until they are enabled, or `until`; the row.

    `stop_policy`: `hard` returns the job to its queue and ends the process; `drain` and `pause` let
    the job finish. Raises as `set_control` does.
    """
    return set_control(
        host, queue, desired_state="off", stop_policy=stop_policy, until=until, conn=conn, **who
    )


def drain(
    host: str,
    queue: str,
    *,
    until: datetime | timedelta | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> WorkerControl:
    """Turn the workers of a host and queue OFF once their running jobs have finished; the row."""
    return disable(host, queue, stop_policy="drain", until=until, conn=conn, **who)


# --- heartbeats --------------------------------------------------------------------------------


def heartbeat(
    host_label: str,
    queue: str,
    *,
    concurrency: int,
    current_model: str | None = None,
    known_models: Iterable[str] | None = None,
    update_current_model: bool = True,
) -> None:
    """Record that a host serves a queue now, which clears its dead flag.

    If `known_models` is None, the stored ones stay.
    """
    values: dict[str, Any] = {
        "host_label": host_label,
        "queue": queue,
        "concurrency": concurrency,
        "current_model": current_model,
        "known_models": None if known_models is None else sorted(known_models),
        "update_current_model": update_current_model,
    }
    with db.transaction() as conn:
        statements.workers.beat(conn, **values)


def clear_model(host_label: str, queue: str, *, mark_stale: bool = True) -> Row | None:
    """Clear the loaded model of a host's heartbeat; return the changed row, None if there is none.

    `mark_stale` also sets its `last_seen` back by an hour, so that it counts as no capacity.
    """
    with db.transaction() as conn:
        return statements.workers.clear_model(
            conn, host=host_label, queue=queue, mark_stale=mark_stale
        )


def flag_stale(*, stale_after_s: float | None = None, conn: db.Connection | None = None) -> Rows:
    """Flag once, with an ERROR in the log, hosts with a stale heartbeat that own running jobs.

    Returns their heartbeat rows, each with the number of its `running_jobs`. `stale_after_s`
    defaults to STALE_WORKER_AFTER_S.
    """
    limit = config.STALE_WORKER_AFTER_S.read() if stale_after_s is None else stale_after_s
    with db.transaction(conn) as own:
        flagged = statements.workers.flag_stale(own, stale_s=limit)
    for row in flagged:
        _log.error(
            "DEAD WORKER: host %s queue %s was last seen at %s and owns %d running jobs; restart "
            "it, its leases bring the jobs back",
            row["host_label"],
            row["queue"],
            row["last_seen"],
            row["running_jobs"],
        )
    return flagged
