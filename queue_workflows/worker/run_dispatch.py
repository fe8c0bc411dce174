"""Plan and dispatch what follows from a worker's completed nodes; leave errors to orchestrators.

Best effort: what fails is left to the orchestrator, since the outbox row is still open.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from queue_workflows import db, errors
from queue_workflows.dispatch import drain, fast_path, run_cache
from queue_workflows.engine import claims, finish, job_tables, outcomes
from queue_workflows.types import Row
from queue_workflows.worker import current_job

T = TypeVar("T")
_log = logging.getLogger(__name__)


class RunDispatch:
    """Plan and dispatch the successors of nodes; ingest jobs have none."""

    def __init__(self, table: job_tables.JobTable, dedicated: db.DedicatedConnection) -> None:
        self._in_run = table.in_run
        self._dedicated = dedicated
        self._begin = run_cache.on_connection(dedicated)

    def planned_after(self, job: Row, outcome: outcomes.Outcome) -> claims.Ahead | None:
        """Return what follows from a completed node, or None if that is left to later."""
        if not self._in_run or outcome.kind != "completed":
            return None
        self._learn([job])
        return self._best_effort(job["run_id"], lambda: fast_path.plan([(job, outcome.result)]))

    def planned(
        self, done: Sequence[tuple[current_job.Work, outcomes.Outcome]]
    ) -> list[finish.Done]:
        """Return completed jobs as `finish` takes them, nodes with what follows from them.

        The nodes of one run are planned together; the last of them has the plan.
        """
        if not self._in_run:
            return [finish.Done(work.lease, outcome) for work, outcome in done]
        self._learn([work.job for work, _ in done])
        runs: dict[str, list[tuple[current_job.Work, outcomes.Outcome]]] = {}
        for each in done:
            runs.setdefault(each[0].job["run_id"], []).append(each)
        found: list[finish.Done] = []
        for run_id, nodes in runs.items():
            results = [(work.job, outcome.result) for work, outcome in nodes]
            ahead = self._best_effort(run_id, functools.partial(fast_path.plan, results))
            before = ahead and ahead._replace(rows=None, complete=False)
            found += [finish.Done(work.lease, outcome, before) for work, outcome in nodes]
            found[-1] = found[-1]._replace(ahead=ahead)
        return found

    def _learn(self, jobs: Sequence[Row]) -> None:
        """Read the graphs of the runs of these nodes, which are about to be recorded."""
        if jobs:
            run_id = jobs[0]["run_id"]
            self._best_effort(run_id, lambda: fast_path.learn(self._begin, jobs))

    def note(self, job: Row) -> None:
        """Remember that a job was recorded as completed."""
        if self._in_run:
            self._best_effort(job["run_id"], lambda: fast_path.note(job))

    def drain(self, run_id: str) -> int:
        """Dispatch the successors of what this worker has finished; return the number of new rows.

        0 too after an error.
        """
        return (
            self._best_effort(
                run_id, lambda: drain.drain_run(run_id, begin=self._begin, nowait=True)
            )
            or 0
        )

    def _best_effort(self, run_id: str, dispatch: Callable[[], T]) -> T | None:
        """Return the result of a dispatching step, or None if it raises.

        A run's row may have any content. The orchestrator fails such a run with the reason.
        """
        try:
            return dispatch()
        except db.Error as error:
            _log.debug(
                "run %s is left to the orchestrator: %s", run_id, error, extra={"run_id": run_id}
            )
            self._dedicated.close()
        except errors.QueueWorkflowsError as error:
            _log.debug(
                "run %s is left to the orchestrator: %s", run_id, error, extra={"run_id": run_id}
            )
        except Exception as error:  # noqa: BLE001  best effort: a hostile run must not end the worker
            _log.warning(
                "run %s is left to the orchestrator: %r", run_id, error, extra={"run_id": run_id}
            )
        return None
