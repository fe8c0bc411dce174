"""Serve endpoints of FastAPI that insert a row with psycopg, to compare the service with."""

from __future__ import annotations

import os
import sys
from typing import Any

import fastapi
import psycopg_pool
import pydantic
import uvicorn
from psycopg.types.json import Jsonb

INSERT = (
    "INSERT INTO bare_jobs (task_name, queue, reason, priority, args)"
    " VALUES (%s, %s, 'http', 100, %s) RETURNING id"
)
INSERT_JOB = (
    "INSERT INTO ingest_jobs (task_name, queue, reason, args, lock_key, max_attempts)"
    " VALUES (%s, %s, 'http', %s, %s, 5) RETURNING id"
)
app = fastapi.FastAPI()
pool = psycopg_pool.ConnectionPool(
    os.environ["QUEUE_WORKFLOWS_DB_URL"], min_size=8, max_size=8, kwargs={"autocommit": True}
)


class Trigger(pydantic.BaseModel):
    """The body of the service's trigger."""

    queue: str
    task: str
    args: dict[str, Any] = {}
    lock_key: str


@app.post("/api/v1/jobs/trigger")
def trigger(body: Trigger) -> dict[str, Any]:
    """Insert a job."""
    with pool.connection() as conn:
        row = conn.execute(INSERT, (body.task, body.queue, Jsonb(body.args))).fetchone()
    assert row is not None
    return {"job_id": str(row[0]), "status": "queued"}


@app.post("/job")
def job(body: Trigger) -> dict[str, Any]:
    """Insert a job of the engine by plain SQL."""
    values = (body.task, body.queue, Jsonb(body.args), body.lock_key)
    with pool.connection() as conn:
        row = conn.execute(INSERT_JOB, values).fetchone()
    assert row is not None
    return {"job_id": str(row[0]), "status": "queued"}


@app.get("/health")
async def health() -> dict[str, str]:
    """Return that it answers."""
    return {"status": "ok"}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
