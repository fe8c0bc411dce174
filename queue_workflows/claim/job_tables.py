"""Describe the two job tables, and the identity of one claim (`Lease`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from queue_workflows import config


class JobTable(NamedTuple):
    """One of the two job tables, with the properties in which they differ."""

    name: str
    events: str
    in_run: bool
    """Whether jobs are nodes of a run. Nodes have an outbox, and end when their run ends."""
    ready_channel: str
    """The channel that announces claimable jobs; the payload is their queue."""


UNKNOWN_NODE_S = 120.0
"""Seconds for which a node that a worker does not know is left to other workers. Within this time
new code is usually deployed to all machines."""
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
"""The highest generation that the database allows. A retry adds one, or two in a run. Statements
contain it as a number."""


def fence(lease: Lease, **parameters: Any) -> dict[str, Any]:
    """Return parameters that identify a claim, for a statement that checks it, and `parameters`."""
    claim = {"job": lease.job_id, "worker": lease.worker_id, "claim": lease.claim_no}
    return claim | parameters


def fence_all(leases: Sequence[Lease], **parameters: Any) -> dict[str, Any]:
    """Return parameters that identify claims, as arrays for one statement, and `parameters`."""
    claims = {
        "jobs": [lease.job_id for lease in leases],
        "claims": [lease.claim_no for lease in leases],
        "workers": [lease.worker_id for lease in leases],
    }
    return claims | parameters
