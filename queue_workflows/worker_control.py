"""Run `queue-worker-control`, poll its rows for a worker, and keep 0.3.0 names of `workers`."""

from __future__ import annotations

import argparse
import os
from datetime import datetime, timedelta

from queue_workflows import acts, config, db, errors, workers
from queue_workflows.runtime import app_loading, clock, display, entry_point, exit_codes, service
from queue_workflows.types import ExitFn, WorkerControl

EXIT_CONTROL_HARD_STOP = exit_codes.CONTROL
STOP_POLICIES = workers.STOP_POLICIES
PATIENCE_S = 10.0
"""How long the command waits for a database that does not answer."""


# --- names of 0.3.0 ----------------------------------------------------------------------------


def set_worker_control(
    host_label: str,
    queue: str,
    *,
    desired_state: str,
    stop_policy: str = "hard",
    requested_by: str | None = None,
    conn: db.Connection | None = None,
) -> WorkerControl:
    """Call `workers.set_control`."""
    return workers.set_control(
        host_label,
        queue,
        desired_state=desired_state,
        stop_policy=stop_policy,
        by=requested_by,
        conn=conn,
    )


def get_worker_control(host_label: str, queue: str) -> WorkerControl | None:
    """Call `workers.get_control`."""
    return workers.get_control(host_label, queue)


def desired_state_for(host_label: str, queue: str) -> str:
    """Call `workers.desired_state`."""
    return workers.desired_state(host_label, queue)


def enable_worker(host_label: str, queue: str, *, requested_by: str | None = None) -> WorkerControl:
    """Call `workers.enable`."""
    return workers.enable(host_label, queue, by=requested_by)


def disable_worker(
    host_label: str, queue: str, *, stop_policy: str = "hard", requested_by: str | None = None
) -> WorkerControl:
    """Call `workers.disable`."""
    return workers.disable(host_label, queue, stop_policy=stop_policy, by=requested_by)


# --- the watcher -------------------------------------------------------------------------------

CHANNEL = "worker_control"


class WorkerControlWatcher:
    """Watch the control row of a (host, queue) and stop its worker when it is OFF.

    `host` and `queue` default to the worker's attributes of these names, `host` then to the
    environment's label. `start` starts a thread of its own, and `stop` ends it.
    """

    def __init__(
        self,
        worker: workers.StoppableWorker,
        *,
        on_exit: ExitFn = os._exit,
        host: str | None = None,
        queue: str | None = None,
    ) -> None:
        self._worker = worker
        self._host: str = host or getattr(worker, "host", None) or config.host_label()
        self._queue: str = queue or getattr(worker, "queue", "")
        if not self._queue:
            raise errors.UnknownQueue("the worker has no attribute queue: pass queue=")
        self._on_exit = on_exit
        self._follow: service.Follow[db.Wake] | None = None

    def check_once(self) -> bool:
        """Run the policy if the worker is OFF and control is enabled; return whether it did."""
        if config.DISABLE_WORKER_CONTROL.read():
            return False
        policy = workers.policy_in_force(self._host, self._queue)
        if policy is not None:
            workers.stop_policy(policy)(self._worker, on_exit=self._on_exit)
        return policy is not None

    def start(self) -> None:
        """Check now, at each notification, and every WORKER_CONTROL_POLL_S seconds.

        Errors are logged, and checking continues. Raises RuntimeError when it was started before.
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


# --- the command -------------------------------------------------------------------------------


def _until(text: str) -> datetime | timedelta:
    try:
        return clock.parse_until(text)
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
    parser.add_argument(
        "--requested-by", metavar="WHO", help="who requests it, for the record; default: your login"
    )
    parser.add_argument("--reason", help="why, for the record")
    parser.add_argument(
        "--until",
        type=_until,
        metavar="WHEN",
        help="when it turns itself ON again: 30s, 45m, 2h, 1d, or an ISO time with its zone",
    )
    entry_point.add_common_arguments(parser)
    return parser


def _join_embedded() -> None:
    """Join the embedded server if no DSN is set; raise `EmbeddedUnavailable` if there is none."""
    if config.database_url() is None:
        from queue_workflows.db import databases

        databases.join(create=False)
        config.configure(embedded=True)


def main(argv: list[str] | None = None) -> int:
    """Run `queue-worker-control`: write the control row; return 0, or 2 and a line for a fault."""
    options = _parser().parse_args(argv)

    def body() -> int:
        entry_point.start(options)
        app_loading.load_app(options.app)
        _join_embedded()
        db.wait_until_reachable(timeout_s=PATIENCE_S)
        db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
        workers.refuse_unknown(options.queue)
        with acts.acting(options.requested_by, reason=options.reason, via="cli"):
            row = workers.set_control(
                options.host or config.host_label(),
                options.queue,
                desired_state=options.state,
                stop_policy=options.policy,
                until=options.until,
            )
        until = f" until {display.moment(row['until_at'])}" if row["until_at"] else ""
        text = f"{row['host_label']} {row['queue']}: {row['desired_state']}{until}"
        print(display.line(text, None))
        return 0

    return entry_point.run_main("queue-worker-control", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
