"""`python examples/etl`: queue a job per file, run them to their end, print what was loaded."""

from __future__ import annotations

import sys
import time

import etl

from queue_workflows import db, node_queue
from queue_workflows.claim_worker import ClaimWorker

LIVE = ("queued", "running")


def queue() -> dict[str, str]:
    """Queue a job per file in one transaction; return their ids. The same content is the same job.

    Two at once would be in each other's way: of the jobs of one lock key one runs at a time, the
    oldest first, so that countries are there before their zones.
    """
    with db.connection() as conn:
        return {
            file: node_queue.enqueue_ingest_job(
                task_name="load_file",
                queue="etl",
                args={"file": file},
                lock_key="atlas",
                idempotency_key=f"{file} {etl.fingerprint(file)}",
                conn=conn,
            )
            for file in etl.FILES
        }


def main() -> int:
    etl.setup()
    etl.prepare()
    jobs = queue()
    # A script's worker; a service has processes: queue-claim-worker --queue=etl --app etl:setup.
    worker = ClaimWorker(queue="etl")
    over = True
    for file, job_id in jobs.items():
        while (job := node_queue.get_ingest_job(job_id))["status"] in LIVE:
            if not worker.run_once():
                time.sleep(1)  # another worker has it, or it waits for its next attempt
        print(f"{file}: {job['status']}, {job['error'] or job['result']}, job {job_id}")
        over = over and job["status"] == "completed"
    with db.connection() as conn:
        for row in conn.execute(
            "SELECT c.name, string_agg(z.zone, ', ' ORDER BY z.zone) AS zones"
            " FROM atlas.country c JOIN atlas.country_zone z USING (code)"
            " WHERE c.code IN ('NZ', 'PT') GROUP BY c.name ORDER BY c.name"
        ):
            print(f"{row['name']}: {row['zones']}")
    db.close_pool()
    return 0 if over else 1


if __name__ == "__main__":
    sys.exit(main())
