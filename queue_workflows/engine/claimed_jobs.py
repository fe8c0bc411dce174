"""Read a claimed job column by column."""

from __future__ import annotations

import json

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.types import Row, Unreadable


def read(table: job_tables.JobTable, job_id: str, worker_id: str) -> db.Script[Row | None]:
    """Return what a worker needs of a job that it holds, each column loaded by itself.

    A node's `context` is left out. None: the worker does not hold the job any more.
    """
    statement = statements.claimed_jobs.node if table.in_run else statements.claimed_jobs.ingest
    return db.one(statement, {"job": job_id, "worker": worker_id})


def id_of(document: Unreadable) -> str:
    """Return the id that a claimed node's JSON document begins with."""
    text = document.raw.decode(errors="replace")
    return json.JSONDecoder().raw_decode(text, len('{"id":'))[0]
