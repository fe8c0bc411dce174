"""Run `queue-orchestrator`: migrate the schema, then run a `node_pool.NodePool` until a stop."""

from __future__ import annotations

import argparse
import logging

from queue_workflows import config, db, errors, node_pool
from queue_workflows.event_export import settings
from queue_workflows.runtime import app_loading, entry_point, signals

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


def serve(stop: signals.StopRequest) -> int:
    """Migrate, recover and dispatch until a stop is requested; return 0."""
    exports = settings.wanted()
    if not bring_schema(stop):
        return 0
    registrar = config.get_config().builtin_model_registrar
    pool = node_pool.NodePool(registrar, pause=stop.requested.wait)
    try:
        if start(pool, stop):
            _log.info("orchestrator dispatches on %s", db.describe())
            with settings.running(exports):
                stop.requested.wait()
    finally:
        pool.stop()
        db.close_pool()
    return 0


def start(pool: node_pool.NodePool, stop: signals.StopRequest) -> bool:
    """Start the pool, also after a long outage; return False if a stop was requested before."""
    while not stop.requested.is_set():
        try:
            pool.start()
        except db.Error as error:
            _log.warning("recovery failed, waiting for the database: %s", error)
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
    entry_point.add_common_arguments(parser)
    options = parser.parse_args(argv)

    def body() -> int:
        entry_point.start(options)
        app_loading.load_app(options.app)
        with signals.StopRequest() as stop:
            return serve(stop)

    return entry_point.run_main("queue-orchestrator", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
