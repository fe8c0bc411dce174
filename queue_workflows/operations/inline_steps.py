"""Record the steps of handlers that run in the process of their worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from queue_workflows import db
from queue_workflows.engine import job_steps, job_tables
from queue_workflows.tasks import control
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
AGAIN_FIRST_S = 0.1
AGAIN_MAX_S = 5.0


def asker(table: job_tables.JobTable, job: Row, interrupted: Callable[[], bool]) -> control.Ask:
    """Return what answers the requests of a claimed job's handler, each in the calling thread.

    Each takes a connection of the pool for one statement. While the database is away the call
    waits: the lease ends that, or the first try after `interrupted` is true.
    """

    def ask(request: JsonDict) -> control.Answered:
        return control.answered(lambda: _answer(table, job, interrupted, request))

    return ask


def _answer(
    table: job_tables.JobTable, job: Row, interrupted: Callable[[], bool], request: JsonDict
) -> JsonDict:
    lease, pause_s = job_tables.lease_of(table, job), AGAIN_FIRST_S
    while True:
        try:
            with db.statement() as conn:
                return db.run(conn, job_steps.answer(lease, request))
        except (db.OperationalError, db.InterfaceError) as error:
            if interrupted():
                raise
            _log.warning("a step waits for the database: %s", str(error).strip())
            time.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, 2 * pause_s)
