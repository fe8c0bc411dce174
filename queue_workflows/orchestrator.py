"""The orchestrator process: brings the schema, takes back what is lapsed, and dispatches."""

from __future__ import annotations

import argparse
import logging

from queue_workflows import config, db, node_pool
from queue_workflows.runtime import process, signals

_log = logging.getLogger("queue_workflows.orchestrator")


def bring_schema(stop: signals.StopRequest) -> bool:
    """Wait for the database and apply what it lacks; False when a stop was requested first."""
    while db.wait_until_reachable(stopped=stop.requested.is_set, pause=stop.requested.wait):
        try:
            applied = db.bootstrap()
        except db.OperationalError as error:
            _log.warning("the database went away while the schema was looked at: %s", error)
            stop.requested.wait(config.NODE_POOL_RECOVERY_BACKOFF_S.read())
            continue
        if applied:
            _log.info("applied migrations %s", ", ".join(map(str, applied)))
        return True
    return False


def recover(stop: signals.StopRequest) -> None:
    """Reclaim what is lapsed or ownerless; a fresh lease is never touched.

    No crash is counted: nobody knows whether the database was there until now.
    Retried NODE_POOL_RECOVERY_RETRIES times; what fails then is left to the sweeps.
    """
    tries = max(1, config.NODE_POOL_RECOVERY_RETRIES.read())
    for attempt in range(1, tries + 1):
        try:
            node_pool.reclaim(had_s=0.0)
            node_pool.sweep_orphans()
        except db.Error as error:
            _log.warning("recovery at boot, try %d of %d: %s", attempt, tries, error)
            if stop.requested.wait(config.NODE_POOL_RECOVERY_BACKOFF_S.read()):
                return
        else:
            return


def serve(stop: signals.StopRequest) -> int:
    """Bootstrap, recover and dispatch until a stop is requested; 0."""
    if not bring_schema(stop):
        return 0
    recover(stop)
    pool = node_pool.NodePool(config.get_config().builtin_model_registrar)
    try:
        pool.start()
        _log.info("orchestrator dispatches on %s", db.describe())
        stop.requested.wait()
    finally:
        pool.stop()
        db.close_pool()
    return 0


def main(argv: list[str] | None = None) -> int:
    """`queue-orchestrator`: run until SIGTERM or SIGINT; 2 for what cannot work."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="queue-orchestrator",
        description="Bring the schema, dispatch runs, sweep.",
    )
    process.add_common_arguments(parser)
    options = parser.parse_args(argv)

    def body() -> int:
        process.setup_logging(options.log_level)
        if options.embedded:
            config.configure(embedded=True)
        config.load_app(options.app)
        with signals.StopRequest() as stop:
            return serve(stop)

    return process.run_main("queue-orchestrator", body, debug=options.debug)


if __name__ == "__main__":
    raise SystemExit(main())
