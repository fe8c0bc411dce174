"""The operator's ON/OFF switch for the worker of a (host, queue): one row, one policy."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Protocol, cast

from queue_workflows import config, db, errors, queues
from queue_workflows.db import check_violations
from queue_workflows.engine import controls
from queue_workflows.runtime import display, process, service
from queue_workflows.types import ExitFn, WorkerControl

_log = logging.getLogger(__name__)
EXIT_CONTROL_HARD_STOP = 79
STATES = ("on", "off")
ALL = "all"
"""The queue of a row that counts for every queue of its host."""
PATIENCE_S = 10.0
"""How long the command waits for a database that does not answer."""


class StoppableWorker(Protocol):
    """What a stop policy may ask of a worker."""

    def requeue_in_flight(self, reason: str) -> None:
        """Give the running job back, at the front, without counting anything."""
        ...

    def clear_model(self) -> None:
        """Tell the fleet that this host's model is gone."""
        ...


class StopPolicy(Protocol):
    """How a worker that was turned OFF stops."""

    def __call__(self, worker: Any, *, on_exit: ExitFn) -> None:
        """Stop `worker` (a `StoppableWorker`); `on_exit` leaves the process."""
        ...


def _hard(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Requeue what runs, clear the model, leave: the only stop that surely frees RAM and VRAM."""
    try:
        worker.requeue_in_flight("turned off")
        worker.clear_model()
    except db.Error as error:
        _log.warning("stopping without bookkeeping, the lease brings the job back: %s", error)
    on_exit(EXIT_CONTROL_HARD_STOP)


def _finish(worker: StoppableWorker, *, on_exit: ExitFn) -> None:
    """Let what runs come to its end: while a row says OFF nothing else is claimed."""
    del worker, on_exit


HARD: StopPolicy = _hard
STOP_POLICIES: dict[str, StopPolicy] = {"hard": _hard, "drain": _finish, "pause": _finish}
"""Policy name → handler(worker, *, on_exit); a host may add its own. `pause` keeps a model warm."""


def handler(policy: str) -> StopPolicy:
    """The handler of a policy; one that nobody registered is `hard`, with an error logged."""
    found = STOP_POLICIES.get(policy)
    if found is None:
        _log.error("stop policy %r is not registered; stopping hard", policy)
    return found or _hard


@check_violations.translated()
def set_worker_control(
    host: str,
    queue: str,
    *,
    desired_state: str,
    stop_policy: str = "hard",
    requested_by: str | None = None,
    reason: str | None = None,
    until: datetime | timedelta | None = None,
    conn: db.Connection | None = None,
) -> WorkerControl:
    """Write the row of a (host, queue), which wakes its worker; the row.

    Queue `all`: every queue of the host. `until`: when OFF ends by itself, a time with a time zone
    or how long from now by the database's clock.
    `conn`: join the caller's transaction. Raises before any write `UnknownPolicy` (a ValueError)
    for a bad state, policy or name, `InvalidConfig` (a ValueError) for a bad `until`.
    """
    if desired_state not in STATES:
        raise errors.UnknownPolicy(f"desired_state {desired_state!r}: it is 'on' or 'off'")
    if stop_policy not in STOP_POLICIES:
        known = ", ".join(sorted(STOP_POLICIES))
        raise errors.UnknownPolicy(f"stop policy {stop_policy!r}: registered are {known}")
    if until is not None and desired_state == "on":
        raise errors.InvalidConfig("until: it says when OFF ends, and has no meaning for ON")
    at, lasts = queues.moment(until)
    for what, name, most in (("host", host, 400), ("queue", queue, 200)):
        if not 1 <= len(name.encode()) <= most or "\x00" in name:
            raise errors.UnknownPolicy(f"{what} {name[:40]!r}: its name has 1 to {most} bytes")
    values = {
        "host": host,
        "queue": queue,
        "desired_state": desired_state,
        "stop_policy": stop_policy,
        "requested_by": requested_by,
        "reason": None if reason is None else reason.replace("\x00", " "),
        "until": at,
        "lasts": lasts,
    }
    with db.transaction(conn) as own:
        if at is not None and controls.is_over(own, at):
            raise errors.InvalidConfig(
                f"until {at}: that is over by the database's clock; name a time to come, or a time "
                "span from now"
            )
        return cast("WorkerControl", controls.put(own, values))


def get_worker_control(host: str, queue: str) -> WorkerControl | None:
    """The row, or None; None too in a database without the table."""
    with db.transaction() as conn:
        return cast("WorkerControl | None", controls.get(conn, host, queue))


def desired_state_for(host: str, queue: str) -> str:
    """`"on"` or `"off"`; absent: `"on"`, and past its `until_at` too."""
    return "on" if policy_in_force(host, queue) is None else "off"


def policy_in_force(host: str, queue: str) -> str | None:
    """The policy by which the worker of a (host, queue) must stop now, or None while it is ON."""
    with db.transaction() as conn:
        return controls.off_policy(conn, host, queue)


def stop_policy_for(conn: db.Connection, host: str, queue: str) -> str | None:
    """The policy by which the worker must stop now, or None while it is ON."""
    return controls.off_policy(conn, host, queue)


def enable_worker(
    host: str, queue: str, *, requested_by: str | None = None, reason: str | None = None
) -> WorkerControl:
    """Turn the worker of a (host, queue) ON: a parked one resumes in place.

    ON for queue `all` lifts that row alone; a queue with an OFF row of its own stays OFF.
    """
    return set_worker_control(
        host, queue, desired_state="on", requested_by=requested_by, reason=reason
    )


def disable_worker(
    host: str,
    queue: str,
    *,
    stop_policy: str = "hard",
    requested_by: str | None = None,
    reason: str | None = None,
    until: datetime | timedelta | None = None,
) -> WorkerControl:
    """Turn the worker of a (host, queue) OFF by a policy, until it is enabled or `until`."""
    return set_worker_control(
        host,
        queue,
        desired_state="off",
        stop_policy=stop_policy,
        requested_by=requested_by,
        reason=reason,
        until=until,
    )


CHANNEL = "worker_control"


class WorkerControlWatcher:
    """Follows the row of a (host, queue) and stops its worker when it says OFF.

    `host` and `queue` default to the worker's attributes of these names, `host` then to the
    environment's label. `read` returns the policy in force, None while the worker is ON. `start`
    and `stop` run a thread of its own; a worker of this package calls `policy` and `obey` on the
    thread that renews its leases.
    """

    def __init__(
        self,
        worker: StoppableWorker,
        *,
        on_exit: ExitFn = os._exit,
        host: str | None = None,
        queue: str | None = None,
        read: Callable[[str, str], str | None] = policy_in_force,
    ) -> None:
        self._worker = worker
        self._host: str = host or getattr(worker, "host", None) or config.host_label()
        self._queue: str = queue or getattr(worker, "queue", "")
        if not self._queue:
            raise errors.UnknownQueue("the worker has no attribute queue: pass queue=")
        self._on_exit = on_exit
        self._read = read
        self._follow: service.Follow[db.Wake] | None = None

    def policy(self) -> str | None:
        """Return how the worker has to stop now; None while it is ON or control is disabled."""
        if config.DISABLE_WORKER_CONTROL.read():
            return None
        return self._read(self._host, self._queue)

    def obey(self, policy: str) -> None:
        """Run the handler of a policy."""
        handler(policy)(self._worker, on_exit=self._on_exit)

    def check_once(self) -> bool:
        """Whether the worker is OFF; if so its policy has run."""
        policy = self.policy()
        if policy is None:
            return False
        self.obey(policy)
        return True

    def start(self) -> None:
        """Check now, at each notification, and every WORKER_CONTROL_POLL_S seconds.

        Errors are logged, and checking goes on. Raises RuntimeError when it was started before.
        """
        if self._follow is not None:
            raise RuntimeError("this watcher was started before; make a new one")
        listener = db.listen(CHANNEL, poll_s=config.WORKER_CONTROL_POLL_S.read)
        self._follow = service.Follow("worker-control", listener, lambda _: self.check_once())
        self._follow.start()

    def stop(self) -> None:
        """Stop checking."""
        if self._follow is not None:
            self._follow.stop()


def _until(text: str) -> datetime | timedelta:
    try:
        return queues.when(text)
    except errors.InvalidConfig as refused:
        raise argparse.ArgumentTypeError(str(refused)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="queue-worker-control",
        description="Turn the worker of a host and queue ON or OFF.",
    )
    parser.add_argument("--queue", required=True, help="cpu, gpu, an ingest queue, or all")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument(
        "--on", dest="state", action="store_const", const="on", help="let them claim"
    )
    state.add_argument(
        "--off", dest="state", action="store_const", const="off", help="let them claim no more"
    )
    parser.add_argument("--host", help="host label; default: this host's")
    parser.add_argument("--policy", default="hard", help="how to stop: " + ", ".join(STOP_POLICIES))
    parser.add_argument("--requested-by", metavar="WHO", help="who asks, for the record")
    parser.add_argument("--reason", help="why, for the record")
    parser.add_argument(
        "--until",
        type=_until,
        metavar="WHEN",
        help="when it turns itself ON again: 30s, 45m, 2h, 1d, or an ISO time with its zone",
    )
    process.add_common_arguments(parser)
    return parser


def _refuse_unknown(queue: str) -> None:
    with db.transaction() as conn:
        known = config.queues() | {ALL, *controls.known_queues(conn)}
    if queue not in known:
        raise errors.UnknownQueue(
            f"queue {queue!r}: no worker has ever served it; known are {', '.join(sorted(known))}, "
            "and --app names those of a host app"
        )


def _join_embedded() -> None:
    """Make no server that has no row to write; `EmbeddedUnavailable` where there is none."""
    if config.database_url() is None and config.embedded_wanted():
        from queue_workflows.db import databases

        databases.join(create=False)


def main(argv: list[str] | None = None) -> int:
    """`queue-worker-control`: write the control row; 0, or 2 with one line for what is wrong."""
    options = _parser().parse_args(argv)

    def body() -> int:
        process.setup_logging(options.log_level)
        if options.embedded:
            config.configure(embedded=True)
        config.load_app(options.app)
        _join_embedded()
        db.wait_until_reachable(timeout_s=PATIENCE_S)
        db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
        _refuse_unknown(options.queue)
        row = set_worker_control(
            options.host or config.host_label(),
            options.queue,
            desired_state=options.state,
            stop_policy=options.policy,
            requested_by=options.requested_by,
            reason=options.reason,
            until=options.until,
        )
        until = f" until {display.moment(row['until_at'])}" if row["until_at"] else ""
        text = f"{row['host_label']} {row['queue']}: {row['desired_state']}{until}"
        print(display.line(text, None))
        return 0

    return process.run_main("queue-worker-control", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
