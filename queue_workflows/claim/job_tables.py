"""Describe the two job tables, and the identity of one claim (`Lease`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from queue_workflows import config


class JobTable(NamedTuple):
    """The differences between the two job families; most statements serve both."""

    name: str
    events: str
    in_run: bool
    """Whether jobs are nodes of a run. These have an outbox, and end when their run ends."""
    ready_channel: str
    """Where the database notifies that a queue, the payload, has a job to claim."""


UNKNOWN_NODE_S = 120.0
"""Seconds for which a node that workers do not know is left to others. A deployment of new code to
a fleet, machine by machine, is then done."""
NODE_JOBS = JobTable(
    "workflow_node_jobs", "workflow_node_events", in_run=True, ready_channel="node_job_ready"
)
INGEST_JOBS = JobTable(
    "ingest_jobs", "ingest_job_events", in_run=False, ready_channel="ingest_job_ready"
)


def of_queue(queue: str) -> JobTable:
    """Return the table of a queue's jobs."""
    return NODE_JOBS if queue in config.DAG_QUEUES else INGEST_JOBS


class Lease(NamedTuple):
    """One claim. Every write about a running job requires all of its fields to match."""

    table: JobTable
    job_id: str
    worker_id: str
    claim_no: int


def lease_of(table: JobTable, job: dict[str, Any]) -> Lease:
    """Return the lease of a row as its claim returned it."""
    return Lease(table, job["id"], job["worker_id"], job["claim_no"])


LAST_GENERATION = 1_000_000
"""The last generation that the database allows; a retry adds one, or two in a run. Statements have
it as a number."""


def fence(lease: Lease, **parameters: Any) -> dict[str, Any]:
    """Return the parameters of a fenced statement, which identify the claim, and others."""
    claim = {"job": lease.job_id, "worker": lease.worker_id, "claim": lease.claim_no}
    return claim | parameters


def fence_all(leases: Sequence[Lease], **parameters: Any) -> dict[str, Any]:
    """Return the parameters of a statement that identify claims, by arrays, and others."""
    claims = {
        "jobs": [lease.job_id for lease in leases],
        "claims": [lease.claim_no for lease in leases],
        "workers": [lease.worker_id for lease in leases],
    }
    return claims | parameters
