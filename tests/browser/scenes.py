"""Fill a database for the pages of the dashboard: nothing, usual work, long names, trouble.

The rows are inserted as they would be after hours of work, so that no process has to run. Call
`refresh` before pages are read: workers that are silent for half a minute count as dead.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from urllib.parse import quote

from queue_workflows import db, failures
from tests.support import factories, pages, transitions
from tests.support.worker_reports import report

PAGES = {
    "run": "/runs/{run}", "failures": "/failures", "now": "/", "runs": "/runs",
    "waiting": "/waiting", "inbox": "/inbox", "machines": "/machines", "jobs": "/jobs",
    "queues": "/queues", "schedules": "/schedules", "acts": "/acts", "health": "/health",
}  # fmt: skip
"""The twelve pages, with the members of a `Scene` in their addresses."""
EMPTY = {
    "node not queued": "/runs/{run}?node=publish",
    "nothing found": "/runs?status=failed&workflow=nothing",
    "no failures": "/failures?queue=nothing", "no jobs": "/jobs?queue=nothing",
    "no acts": "/acts?actor=nobody", "no items": "/runs/{mapped}/map?node=each&q=nothing",
}  # fmt: skip
"""Pages that have nothing of what they were asked for."""
DETAILS = EMPTY | {
    "graph": "/runs/{run}?show=graph", "list": "/runs/{run}?show=list",
    "node": "/runs/{run}?node={node}", "live run": "/runs/{asks}",
    "node that asks": "/runs/{asks}?node=ask", "again": "/runs/{run}/again",
    "map": "/runs/{mapped}/map?node=each",
    "item": "/runs/{mapped}/map?node=each&key=file-7", "workflow": "/runs?workflow={workflow}",
    "question": "/inbox/question?run={asks}&node=ask", "why": "/waiting?job={waits}",
    "machine": "/machines?host={host}", "job": "/jobs/{job}", "job again": "/jobs/{job}/again",
    "schedule": "/schedules?name={schedule}", "failed jobs": "/jobs?status=failed",
    "failure": "/failures/{group}", "queue": "/queues?queue={queue}",
}  # fmt: skip
"""Pages that the twelve lead to."""
ERRORS = (
    "ValueError: row {} has no price", "TimeoutError: read timed out after {} s",
    "KeyError: 'sku_{}'", "OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB",
    "ConnectionError: host db-{} refused", "PermissionError: /data/out/{}.csv",
)  # fmt: skip
TRACE = """Traceback (most recent call last):
  File "/app/nodes/encode.py", line 41, in encode
    frames = model.encode(clip, size=size)
  File "/app/models/video.py", line 112, in encode
    return self.session.run(batch)
"""
Called = Callable[[str], str]


class Scene(NamedTuple):
    """The ids of a filled database that addresses need."""

    run: str = "nothing"
    """A run that failed, with retries, a model load and a death."""
    node: str = "nothing"
    workflow: str = "nothing"
    mapped: str = "nothing"
    asks: str = "nothing"
    job: str = "nothing"
    """A job that failed."""
    waits: str = "nothing"
    """A job that waits."""
    host: str = "nothing"
    schedule: str = "nothing"
    group: str = "nothing"
    """A group of failures."""
    queue: str = "nothing"

    def address(self, template: str) -> str:
        """Return an address of PAGES or DETAILS with the ids of this scene."""
        quoted = {name: quote(id_, safe="") for name, id_ in self._asdict().items()}
        return template.format(**quoted)


class Attempt(NamedTuple):
    """An attempt of a node: how long it waited, loaded and ran, and the event that ended it."""

    wait_s: float
    load_s: float
    run_s: float
    end: str = "completed"
    error: str | None = None


def refresh(conn: db.Connection) -> None:
    """Let the workers that are not dead report themselves now."""
    conn.execute("UPDATE workers SET last_seen = now() WHERE state <> 'dead'")


def empty(conn: db.Connection) -> Scene:
    """Insert nothing."""
    return Scene()


def short(word: str) -> str:
    return word


def long(word: str) -> str:
    """Return a name of 150 characters, some of which have no place to break."""
    return f"{word}-of-the-northern-and-the-southern-warehouse-{'unbreakable' * 9}"


def hostile(word: str) -> str:
    """Return a name that is markup, a template and a query."""
    return f"{word}{pages.EVIL}?#%2f"


def usual(conn: db.Connection, called: Called = short) -> Scene:
    """Insert two days of work of an app: runs, jobs, a question, a map, two machines, schedules."""
    now = datetime.now(timezone.utc)
    box, gpu_box = called("box-1"), called("box-2")
    for number in range(30):
        _nightly(conn, called, now - timedelta(hours=2 + number), number)
    begin = now - timedelta(minutes=50)
    run = _failed_run(conn, called, begin, box, gpu_box)
    mapped = _mapped_run(conn, called, now - timedelta(minutes=30))
    asks = _asking_run(conn, called, now - timedelta(minutes=12))
    _running_run(conn, called, now - timedelta(seconds=25), gpu_box)
    job, waits = _ingest_jobs(conn, called, now, box)
    workers = ((9, "cpu", box), (10, "gpu", gpu_box), (11, called("load"), box))
    for pid, queue, host in workers:
        model = {"model": {"id": "sdxl", "held_s": 310.0, "load_s": 41.0}} if queue == "gpu" else {}
        claimant = transitions.who(queue, f"{host}:{pid}:a", host=host)
        known = ["sdxl", "flux"] if queue == "gpu" else []
        report(conn, claimant, model, known_models=known, pid=pid)
    _samples(conn, now, box, gpu_box)
    schedule = _schedules(conn, called, now, job)
    _acts(conn, called, run, gpu_box)
    group = failures.group_id(failures.signature(ERRORS[0].format(4)))
    return Scene(
        run, "encode-b", called("nightly"), mapped, asks, job, waits, gpu_box, schedule, group,
        called("load"),
    )  # fmt: skip


def long_names(conn: db.Connection) -> Scene:
    """Insert usual work whose names are all long."""
    return usual(conn, long)


def hostile_names(conn: db.Connection) -> Scene:
    """Insert usual work whose names are all hostile."""
    return usual(conn, hostile)


def on_fire(conn: db.Connection) -> Scene:
    """Insert usual work, a dead machine, failures, an absent orchestrator and a broken schedule."""
    scene, now = usual(conn), datetime.now(timezone.utc)
    # A run that started within the last minute would show that an orchestrator lives.
    conn.execute(
        "UPDATE workflow_runs SET started_at = started_at - interval '2 minutes',"
        " created_at = created_at - interval '2 minutes',"
        " queued_at = queued_at - interval '2 minutes'"
        " WHERE started_at > now() - interval '1 minute'"
    )
    for number in reversed(range(90)):
        at = now - timedelta(minutes=0.6 * number + 1)
        factories.ingest(
            conn, queue="load", task_name=f"task_{number % 4}", status="failed",
            error=ERRORS[number % 7 % 6].format(number), claimed_by=f"box-{1 + number % 5 // 4}",
            created_at=at - timedelta(seconds=9), started_at=at - timedelta(seconds=5),
            finished_at=at, seconds=5.0, attempts=3, max_attempts=3,
        )  # fmt: skip
    for number in range(12):
        factories.run(
            conn, workflow_name="invoices", status="queued", created_at=now - timedelta(minutes=14),
            queued_at=now - timedelta(minutes=14 - number),
        )  # fmt: skip
    factories.insert(
        conn, "workers", worker_id="box-3:9:a", host_label="box-3", queue="gpu", pid=9,
        state="dead", last_seen=now - timedelta(minutes=6),
        detail={"signal": 9, "max_rss_mb": 61440, "seconds": 5400.0, "oom_kills": 1},
    )  # fmt: skip
    factories.insert(
        conn, "worker_controls", host_label="box-4", queue="all", desired_state="off",
        stop_policy="hard", requested_by="bob", reason="new disk",
        until_at=now - timedelta(minutes=40),
    )  # fmt: skip
    factories.insert(
        conn, "worker_controls", host_label="box-2", queue="gpu", desired_state="off",
        stop_policy="drain", requested_by="ann", reason="it smells of smoke",
        updated_at=now - timedelta(minutes=6),
    )  # fmt: skip
    paused_at = now - timedelta(minutes=41)
    factories.insert(conn, "queue_settings", queue="mail", paused_at=paused_at, paused_by="bob")
    _act(conn, 41, "bob", "pause", "queue", "mail")
    _act(conn, 6, "ann", "off", "machine", "box-2", "it smells of smoke", stop_policy="drain")
    for number in range(40):
        factories.ingest(
            conn, queue="mail", task_name="send", created_at=now - timedelta(minutes=40 - number)
        )
    begin = now - timedelta(minutes=9)
    stuck = factories.run(
        conn, workflow_name="posters", created_at=begin, queued_at=begin, started_at=begin
    )
    factories.node(conn, stuck, "paint", queue="gpu", required_model="flux-xl")
    detail = "no gpu worker has the 48 GB that it needs"
    factories.insert(conn, "gpu_unassignable", model="flux-xl", reason="vram", detail=detail)
    conn.execute(
        "UPDATE schedules SET error = 'TypeError: import() takes no Mars/Base', next_at = %s,"
        " last_fire_at = %s WHERE name = 'hourly'",
        [now - timedelta(minutes=40), now - timedelta(minutes=100)],
    )
    return scene


SCENES: dict[str, Callable[[db.Connection], Scene]] = {
    "empty": empty, "usual": usual, "on fire": on_fire, "long names": long_names,
    "hostile names": hostile_names,
}  # fmt: skip


# --- runs --------------------------------------------------------------------------------------


def definition(workflow: str, *entries: dict[str, Any], **deps: str) -> dict[str, Any]:
    """Return a stored definition of nodes made of `name="dep dep"`, and further entries."""
    rest = {"module": "m", "queue": "cpu", "model": None, "inputs": {}, "skip_if": None}
    nodes = [
        {"id": name.replace("_", "-"), "deps": text.split(), **rest} for name, text in deps.items()
    ]
    return {"version": 2, "workflow": workflow, "nodes": [*nodes, *entries]}


def node_with_attempts(
    conn: db.Connection, run_id: str, name: str, begin: datetime, host: str, *attempts: Attempt,
    **columns: Any,
) -> dict[str, Any]:  # fmt: skip
    """Insert a node that was queued at `begin`, with these attempts and the events of each."""
    took = timedelta(seconds=sum(each.wait_s + each.load_s + each.run_s for each in attempts))
    last, count = attempts[-1], len(attempts)
    bad = sum(each.end in ("retried", "failed") for each in attempts)
    job = factories.node(
        conn, run_id, name,
        **{
            "status": "failed" if last.end == "failed" else "completed", "error": last.error,
            "attempts": bad, "max_attempts": max(bad, 1), "claim_no": count, "created_at": begin,
            "started_at": begin + took - timedelta(seconds=last.load_s + last.run_s),
            "finished_at": begin + took, "seconds": last.load_s + last.run_s,
            "context_delta": {"result": name}, "resolved_inputs": {"clip": 7, "size": [1920, 1080]},
        } | columns,
    )  # fmt: skip
    of_node = {"run_id": run_id, "node_id": name, "job_id": job["id"], "host_label": host}
    at = begin

    def event(kind: str, claim_no: int, **more: Any) -> None:
        factories.insert(
            conn, "workflow_node_events", event_type=kind, claim_no=claim_no, created_at=at,
            worker_id=f"{host}:7:a", **of_node, **more,
        )  # fmt: skip

    for claim_no, each in enumerate(attempts, 1):
        at += timedelta(seconds=each.wait_s)
        event("claimed", claim_no)
        at += timedelta(seconds=each.load_s)
        if each.load_s:
            event("model_load_done", claim_no, elapsed_s=each.load_s)
        at += timedelta(seconds=each.run_s)
        used = {"gpu_pct": 71, "vram_mb": 9400, "ram_mb": 3100}
        detail = {"used": used} | ({"traceback": TRACE + each.error} if each.error else {})
        elapsed_s = each.load_s + each.run_s
        event(each.end, claim_no, elapsed_s=elapsed_s, error=each.error, detail=detail)
        factories.insert(
            conn, "job_attempt_logs", job_table="workflow_node_jobs", job_id=job["id"],
            claim_no=claim_no, tail="",
            head="".join(f"frame {n} of 400 encoded\n" for n in range(0, 400, 8)),
        )  # fmt: skip
    return job


def _nightly(conn: db.Connection, called: Called, begin: datetime, number: int) -> None:
    """Insert one of the last runs of the workflow `nightly`."""
    failed = number % 11 == 3
    took = timedelta(seconds=20 + 13 * (number % 5))
    error = ERRORS[number % 6].format(number)
    run_id = factories.run(
        conn, id=called(f"nightly-{number:02}"), workflow_name=called("nightly"),
        status="failed" if failed else "cancelled" if number == 17 else "completed",
        error=f"node {called('sum')}: {error}" if failed else None, context={"tenant": number % 7},
        created_at=begin, queued_at=begin, started_at=begin, finished_at=begin + took,
    )  # fmt: skip
    for name in ("load", "sum"):
        broke = failed and name == "sum"
        factories.node(
            conn, run_id, called(name), status="failed" if broke else "completed",
            error=error if broke else None, claimed_by=called("box-1"), created_at=begin,
            started_at=begin, finished_at=begin + took, seconds=took.total_seconds() / 2,
        )  # fmt: skip


def _failed_run(
    conn: db.Connection, called: Called, begin: datetime, box: str, gpu_box: str
) -> str:
    workflow = called("clips")
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 812 MiB"
    graph = {
        "fetch": "", "cut": "fetch", "title": "fetch", "encode_a": "cut", "encode_b": "cut",
        "check": "encode-a", "publish": "check encode-b title",
    }  # fmt: skip
    run_id = factories.run(
        conn, id=called("clips-1"), workflow_name=workflow, status="failed",
        error=f"node encode-b: {error}", created_at=begin, queued_at=begin, started_at=begin,
        finished_at=begin + timedelta(seconds=391), definition_hash=f"scene {workflow}",
        definition=definition(workflow, **graph),
        context={"clip": "harbour.mp4", "size": [1920, 1080], "api_key": "not to be seen"},
    )  # fmt: skip

    def node(name: str, at_s: float, host: str, *attempts: Attempt, **columns: Any) -> None:
        since = begin + timedelta(seconds=at_s)
        node_with_attempts(conn, run_id, name, since, host, *attempts, **columns)

    gpu = {"queue": "gpu", "required_model": "sdxl"}
    node("fetch", 0, box, Attempt(1, 0, 24))
    timed_out = "TimeoutError: read timed out after 30 s"
    node("title", 25, box, Attempt(2, 0, 31, "retried", timed_out), Attempt(8, 0, 12))
    node("cut", 25, box, Attempt(1, 0, 40))
    node("encode-a", 66, gpu_box, Attempt(12, 41, 90), **gpu)
    node(
        "encode-b", 66, gpu_box,
        Attempt(30, 0, 70, "retried", error), Attempt(20, 41, 66, "retried", error),
        Attempt(24, 0, 74, "failed", error), **gpu,
    )  # fmt: skip
    node("check", 209, box, Attempt(3, 0, 20))
    return run_id


def _mapped_run(conn: db.Connection, called: Called, begin: datetime) -> str:
    workflow, total, failed = called("texts"), 100, (7, 61)
    body = [{"id": "count", "module": "m", "deps": []}]
    entry = {"id": "each", "module": "__map__", "deps": ["scan"], "map": {"body": body}}
    run_id = factories.run(
        conn, id=called("texts-1"), workflow_name=workflow, created_at=begin, queued_at=begin,
        started_at=begin, definition=definition(workflow, entry, scan=""),
        definition_hash=f"scene {workflow}",
    )  # fmt: skip
    node_with_attempts(conn, run_id, "scan", begin, called("box-1"), Attempt(0.4, 0, 1.2))
    factories.node(conn, run_id, "each", node_module="__map__", blocked_reason="items")
    factories.insert(
        conn, "workflow_run_maps", run_id=run_id, node_id="each", generation=0, at_once=4, refill=1,
        may_fail=5, total=total, done_items=70 - len(failed), failed_items=len(failed),
        open_items=0, next_position=70, nodes=1,
    )  # fmt: skip
    for number in range(total):
        state = "failed" if number in failed else "done" if number < 70 else "waiting"
        name = called(f"file-{number}.txt") if number != 7 else "file-7"
        error = f"ValueError: {name} is empty" if state == "failed" else None
        conn.execute(
            "INSERT INTO workflow_map_items (run_id, map_id, position, key, item, state, error)"
            " VALUES (%s, 'each', %s, %s, to_jsonb(%s::text), %s, %s)",
            [run_id, number, name, name, state, error],
        )
        if number < 20 or error is not None:
            ended = Attempt(1, 0, 2, "completed" if error is None else "failed", error)
            since = begin + timedelta(seconds=2 + number)
            node_with_attempts(conn, run_id, f"each[{name}]/count", since, called("box-1"), ended)
    return run_id


def _asking_run(conn: db.Connection, called: Called, begin: datetime) -> str:
    run_id = factories.run(
        conn, id=called("posters-1"), workflow_name=called("posters"), created_at=begin,
        queued_at=begin, started_at=begin,
        definition=definition("posters", draw="", ask="draw", print="ask"),
        definition_hash=f"scene {called('posters')}",
    )  # fmt: skip
    node_with_attempts(conn, run_id, "draw", begin, called("box-2"), Attempt(1, 0, 30))
    colours = [called(name) for name in ("red", "blue", "green")]
    factories.node(
        conn, run_id, "ask", node_module="__input__choose_one", status="awaiting_input",
        inputs={"target": "answer"}, started_at=begin + timedelta(seconds=31),
        input_spec={
            "widget": "choose_one", "prompt": called("Which colour has the poster"),
            "options": colours,
        },
    )  # fmt: skip
    return run_id


def _claim(worker: str, host: str, at: datetime) -> dict[str, Any]:
    return {
        "status": "running", "worker_id": worker, "claim_no": 1, "claimed_by": host,
        "started_at": at, "lease_expires_at": datetime.now(timezone.utc) + timedelta(days=1),
    }  # fmt: skip


def _running_run(conn: db.Connection, called: Called, begin: datetime, host: str) -> None:
    run_id = factories.run(
        conn, id=called("nightly-live"), workflow_name=called("nightly"), created_at=begin,
        queued_at=begin, started_at=begin, context={"tenant": 7},
        definition=definition("nightly", load="", sum="load"), definition_hash="scene nightly",
    )  # fmt: skip
    claim = _claim(f"{host}:10:a", host, begin + timedelta(seconds=1))
    factories.node(conn, run_id, called("load"), queue="gpu", created_at=begin, **claim)


# --- the rest ----------------------------------------------------------------------------------


def _ingest_jobs(conn: db.Connection, called: Called, now: datetime, host: str) -> tuple[str, str]:
    """Insert jobs of two queues; return the id of a failed one, and of one that waits."""
    load, task, ids = called("load"), called("import"), dict[str, str]()
    limits = {"max_running": 4, "partition_max_running": 2}
    factories.insert(conn, "queue_settings", queue=load, **limits)
    # The newest comes last, as jobs are listed in the order in which they came.
    for number in reversed(range(24)):
        at = now - timedelta(minutes=5 * number + 3)
        status = "failed" if number % 9 == 4 else "completed"
        error = ERRORS[0].format(number) if status == "failed" else None
        row = factories.ingest(
            conn, queue=load, task_name=task, status=status, error=error, claimed_by=host,
            args={"day": f"2026-03-{number + 1:02}"}, attempts=0 if error is None else 1,
            created_at=at - timedelta(seconds=20), started_at=at - timedelta(seconds=14),
            finished_at=at, seconds=14.0,
        )  # fmt: skip
        ids[status] = row["id"]
    for number in range(6):
        row = factories.ingest(
            conn, queue=load, task_name=task, created_at=now - timedelta(seconds=40 - number),
            lock_key=called("tenant-7") if number > 3 else None,
            partition_key=called(f"tenant-{number}"),
        )  # fmt: skip
        ids.setdefault("queued", row["id"])
    begin = now - timedelta(seconds=12)
    factories.ingest(
        conn, queue=load, task_name=task, created_at=begin, **_claim(f"{host}:11:a", host, begin)
    )
    for number in range(3):
        factories.ingest(
            conn, queue=called("mail"), task_name=called("send"),
            created_at=now - timedelta(seconds=9 - number),
        )  # fmt: skip
    return ids["failed"], ids["queued"]


def _samples(conn: db.Connection, now: datetime, box: str, gpu_box: str) -> None:
    for minute in range(60):
        busy = 30.0 + 50.0 * (minute // 7 % 2) + minute % 5
        cards = [{"id": 0, "use_pct": busy, "vram_used_mb": 4000 + 90 * minute,
                  "vram_total_mb": 24_576}]  # fmt: skip
        for host, gpus in ((box, []), (gpu_box, cards)):
            sample = {
                "cpu_percent": busy, "ram_percent": 40.0, "ram_used_mb": 6000 + 100 * minute,
                "ram_total_mb": 65_536, "gpus": gpus,
            }  # fmt: skip
            factories.insert(
                conn, "hw_samples", host_label=host, every_s=60, slot=minute, sample=sample,
                sampled_at=now - timedelta(minutes=minute),
            )  # fmt: skip


def _schedules(conn: db.Connection, called: Called, now: datetime, job: str) -> str:
    name = called("hourly")
    for each, expression, coming, last in (
        (name, "0 * * * *", timedelta(minutes=20), timedelta(minutes=40)),
        (called("weekly"), "30 3 * * mon", timedelta(days=3), timedelta(days=4)),
    ):
        factories.insert(
            conn, "schedules", name=each, expression=expression, tz="Europe/Berlin",
            task_name=called("import"), queue=called("load"),
        )  # fmt: skip
        conn.execute(
            "UPDATE schedules SET next_at = %s, last_fire_at = %s WHERE name = %s",
            [now + coming, now - last, each],
        )
    for hours, made in ((1, {"job_id": job}), (2, {"skipped": "overlap"}), (3, {"job_id": "gone"})):
        at = now - timedelta(hours=hours)
        factories.insert(conn, "schedule_fires", name=name, fire_at=at, **made)
    return name


def _acts(conn: db.Connection, called: Called, run: str, host: str) -> None:
    """Insert acts, the newest last, after which the machine is on and the queue is open."""
    ann, bob, load = called("ann"), called("bob"), called("load")
    _act(conn, 75, ann, "pause", "queue", load)
    _act(conn, 70, ann, "resume", "queue", load)
    _act(conn, 60, bob, "off", "machine", host, called("new driver"), stop_policy="drain")
    _act(conn, 55, bob, "on", "machine", host)
    _act(conn, 42, ann, "retry", "run", run, "the disk is larger now")


def _act(
    conn: db.Connection, minutes: float, actor: str, action: str, kind: str, subject: str,
    reason: str | None = None, **detail: str,
) -> None:  # fmt: skip
    """Insert an act of so many minutes ago."""
    factories.insert(
        conn, "operator_acts", at=datetime.now(timezone.utc) - timedelta(minutes=minutes),
        actor=actor, action=action, kind=kind, subject=subject, reason=reason, via="http",
        detail=detail,
    )  # fmt: skip
