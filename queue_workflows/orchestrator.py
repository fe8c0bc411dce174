"""Run `queue-orchestrator`: migrate the schema, then run a `node_pool.NodePool` until a stop."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from queue_workflows import config, db, errors, node_pool
from queue_workflows.event_export import exporter
from queue_workflows.runtime import app_loading, entry_point, signals

if TYPE_CHECKING:
    from queue_workflows import scheduler

_log = logging.getLogger("queue_workflows.orchestrator")


def bring_schema(stop: signals.StopRequest) -> bool:
    """Wait for the database and migrate it; return False if a stop was requested before."""
    while db.wait_until_reachable(stopped=stop.requested.is_set, pause=stop.requested.wait):
        try:
            applied = db.bootstrap(stopped=stop.requested.is_set)
        except errors.MigrationFailed:
            if stop.requested.is_set():
                return False
            raise
        except db.OperationalError as error:
            _log.warning("lost the database while checking the schema: %s", error)
            stop.requested.wait(config.NODE_POOL_RECOVERY_BACKOFF_S.read())
            continue
        if applied:
            _log.info("applied migrations %s", ", ".join(map(str, applied)))
        return True
    return False


def serve(stop: signals.StopRequest, schedules: scheduler.Service | None = None) -> int:
    """Migrate, recover and dispatch until a stop is requested; return 0.

    With `schedules` it is the scheduler, too. Its ticker must not listen by itself, and must end at
    a stop request.
    """
    exports = exporter.wanted()
    if not bring_schema(stop):
        return 0
    registrar = config.get_config().builtin_model_registrar
    listens = schedules.listens if schedules else None
    pool = node_pool.NodePool(registrar, pause=stop.requested.wait, listens=listens)
    try:
        if start(pool, stop):
            _log.info("orchestrator dispatches on %s", db.describe())
            with exporter.running(exports):
                if schedules is None:
                    stop.requested.wait()
                else:
                    schedules.run()
    finally:
        pool.stop()
        db.close_pool()
    return 0


def start(pool: node_pool.NodePool, stop: signals.StopRequest) -> bool:
    """Start the pool, waiting for the database; return False if a stop was requested before."""
    while not stop.requested.is_set():
        try:
            pool.start()
        except db.Error as error:
            _log.warning("the recovery failed; it is repeated once the database answers: %s", error)
            if not stop.requested.wait(config.NODE_POOL_RECOVERY_BACKOFF_S.read()):
                db.wait_until_reachable(stopped=stop.requested.is_set, pause=stop.requested.wait)
        else:
            break
    return not stop.requested.is_set()


def main(argv: list[str] | None = None) -> int:
    """Run `queue-orchestrator` until SIGTERM or SIGINT; return 2 if it cannot work."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="queue-orchestrator",
        description="Migrate the schema, dispatch runs, do maintenance.",
    )
    parser.add_argument(
        "--with-scheduler",
        action="store_true",
        help="be the scheduler, too, in the same process: schedules and failure alerts",
    )
    entry_point.add_common_arguments(parser)
    options = parser.parse_args(argv)

    def body() -> int:
        entry_point.start(options)
        app_loading.load_app(options.app)
        schedules = None
        if options.with_scheduler:
            from queue_workflows import scheduler

            schedules = scheduler.Service(listens=False)
        with signals.StopRequest(on_first=schedules.ticker.stop if schedules else None) as stop:
            return serve(stop, schedules)

    return entry_point.run_main("queue-orchestrator", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
