"""The operator's ON/OFF switch for the worker of a (host, queue): one row, one policy."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any, Protocol

from queue_workflows import config, db, errors
from queue_workflows.runtime import process
from queue_workflows.store import controls
from queue_workflows.types import ExitFn, Row

_log = logging.getLogger(__name__)
EXIT_CONTROL_HARD_STOP = 79
STATES = ("on", "off")
PATIENCE_S = 5.0
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


STOP_POLICIES: dict[str, StopPolicy] = {"hard": _hard}
"""Policy name → handler(worker, *, on_exit); a host may add its own."""


def handler(policy: str) -> StopPolicy:
    """The handler of a policy; one that nobody registered is `hard`, with an error logged."""
    found = STOP_POLICIES.get(policy)
    if found is None:
        _log.error("stop policy %r is not registered; stopping hard", policy)
    return found or _hard


def set_worker_control(
    host: str,
    queue: str,
    *,
    desired_state: str,
    stop_policy: str = "hard",
    requested_by: str | None = None,
    conn: db.Connection | None = None,
) -> Row:
    """Write the row of a (host, queue), which wakes its worker; the row.

    `conn`: join the caller's transaction.

    Raises `UnknownPolicy` (a ValueError) before any write for a bad state or policy.
    """
    if desired_state not in STATES:
        raise errors.UnknownPolicy(f"desired_state {desired_state!r}: it is 'on' or 'off'")
    if stop_policy not in STOP_POLICIES:
        known = ", ".join(sorted(STOP_POLICIES))
        raise errors.UnknownPolicy(f"stop policy {stop_policy!r}: registered are {known}")
    for what, name, most in (("host", host, 400), ("queue", queue, 200)):
        if not 1 <= len(name.encode()) <= most or "\x00" in name:
            raise errors.UnknownPolicy(f"{what} {name[:40]!r}: its name has 1 to {most} bytes")
    values = {
        "host": host,
        "queue": queue,
        "desired_state": desired_state,
        "stop_policy": stop_policy,
        "requested_by": requested_by,
    }
    with db.transaction(conn) as own:
        return controls.put(own, values)


def get_worker_control(host: str, queue: str) -> Row | None:
    """The row, or None; None too in a database without the table."""
    with db.transaction() as conn:
        return controls.get(conn, host, queue)


def desired_state_for(host: str, queue: str) -> str:
    """`"on"` or `"off"`; absent: `"on"`, and past its `until_at` too."""
    with db.transaction() as conn:
        return "on" if controls.off_policy(conn, host, queue) is None else "off"


def stop_policy_for(conn: db.Connection, host: str, queue: str) -> str | None:
    """The policy by which the worker must stop now, or None while it is ON."""
    return controls.off_policy(conn, host, queue)


def enable_worker(host: str, queue: str, *, requested_by: str | None = None) -> Row:
    """Turn the worker of a (host, queue) ON: a parked one resumes in place."""
    return set_worker_control(host, queue, desired_state="on", requested_by=requested_by)


def disable_worker(
    host: str, queue: str, *, stop_policy: str = "hard", requested_by: str | None = None
) -> Row:
    """Turn the worker of a (host, queue) OFF by a policy; it stays off until it is enabled."""
    return set_worker_control(
        host, queue, desired_state="off", stop_policy=stop_policy, requested_by=requested_by
    )


class WorkerControlWatcher:
    """Looks at the row of a (host, queue) and stops its worker when it says OFF."""

    def __init__(
        self,
        worker: StoppableWorker,
        *,
        host: str,
        queue: str,
        on_exit: ExitFn,
        read: Callable[[str, str], Row | None] = get_worker_control,
    ) -> None:
        self._worker = worker
        self._host = host
        self._queue = queue
        self._on_exit = on_exit
        self._read = read

    def check_once(self) -> bool:
        """Whether the worker is OFF; if so its policy has run."""
        if config.DISABLE_WORKER_CONTROL.read():
            return False
        row = self._read(self._host, self._queue)
        if row is None or row["desired_state"] != "off":
            return False
        handler(row["stop_policy"])(self._worker, on_exit=self._on_exit)
        return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="queue-worker-control", description="Turn the worker of a host and queue ON or OFF."
    )
    parser.add_argument("--queue", required=True, help="cpu, gpu or an ingest queue")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument("--on", dest="state", action="store_const", const="on")
    state.add_argument("--off", dest="state", action="store_const", const="off")
    parser.add_argument("--host", help="host label; default: this host's")
    parser.add_argument("--policy", default="hard", help="how to stop: " + ", ".join(STOP_POLICIES))
    parser.add_argument("--requested-by", help="who asks, for the record")
    process.add_common_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """`queue-worker-control`: write the control row; 0, or 2 with one line for what is wrong."""
    options = _parser().parse_args(argv)

    def body() -> int:
        process.setup_logging(options.log_level)
        if options.embedded:
            config.configure(embedded=True)
        config.load_app(options.app)
        db.wait_until_reachable(timeout_s=PATIENCE_S)
        row = set_worker_control(
            options.host or config.host_label(),
            options.queue,
            desired_state=options.state,
            stop_policy=options.policy,
            requested_by=options.requested_by,
        )
        print(f"{row['host_label']} {row['queue']}: {row['desired_state']}")
        return 0

    return process.run_main("queue-worker-control", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
