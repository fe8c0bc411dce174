"""What the soak's observer reads of the workers of its queues."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from queue_workflows import worker_control
from tests.soak import observer, tasks
from tests.support import factories

POOL = "box-q:7:boot"


def polled() -> dict[str, Any]:
    """What one poll returns of each worker: (is it off, how many jobs it runs)."""
    watching = observer.Observer([])
    watching._look_for_workers()  # pyright: ignore[reportPrivateUsage]  its thread calls it
    assert len(watching.polls) == 1
    assert {one.at for one in watching.served} <= set(watching.polls)
    return {one.worker: (one.is_off, one.running) for one in watching.served}


def claimed(conn: Any, worker: str, queue: str, **columns: Any) -> None:
    job = factories.ingest(conn, queue=queue, **columns)
    conn.execute(
        "UPDATE ingest_jobs SET status = 'running', claim_no = 1, worker_id = %s,"
        " lease_expires_at = now() + interval '1 minute' WHERE id = %s",
        (worker, job["id"]),
    )


def test_a_poll_shows_who_lives_and_what_it_runs(db: ModuleType) -> None:
    with db.transaction() as conn:
        for worker, host, queue, state in (
            (f"{POOL}:a", "box-q", tasks.FEEDS, "busy"),
            (f"{POOL}:b", "box-q", tasks.NOTES, "idle"),
            ("box-c:8:boot:c", "box-c", tasks.NOTES, "parked"),
            ("box-b:9:boot:d", "box-b", tasks.NOTES, "idle"),
            ("box-b:6:boot:e", "box-b", tasks.NOTES, "dead"),
            ("box-x:5:boot:f", "box-x", "other", "idle"),
            ("box-e:4:boot:g", "box-e", "cpu", "busy"),
            ("box-g:3:boot:h", "box-g", "gpu", "busy"),
        ):
            factories.insert(
                conn, "workers", worker_id=worker, host_label=host, queue=queue, pid=7, state=state
            )
        claimed(conn, f"{POOL}:a", tasks.FEEDS)
        claimed(conn, "box-b:9:boot:d", tasks.NOTES)
        for status in ("running", "running", "queued"):
            factories.node(
                conn, factories.run(conn), status=status,
                worker_id="box-e:4:boot:g" if status == "running" else None,
            )  # fmt: skip
    worker_control.set_worker_control("box-b", tasks.NOTES, desired_state="off", requested_by="me")
    found = {
        f"{POOL}:a": (False, 1),
        f"{POOL}:b": (False, 0),
        "box-c:8:boot:c": (True, 0),
        "box-b:9:boot:d": (True, 1),
        "box-e:4:boot:g": (False, 2),
    }
    assert polled() == found
