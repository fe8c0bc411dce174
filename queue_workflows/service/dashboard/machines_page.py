"""Show machines with their workers, models and use, switch them, and load or unload models."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, errors, models, types, workers
from queue_workflows.db import statements
from queue_workflows.runtime import clock, display, stored_json
from queue_workflows.service.dashboard import forms, strip, view
from queue_workflows.types import JsonDict, Row, Rows

router = fastapi.APIRouter()
SWITCHES: Final = 11
"""Switches of a machine that are shown, the first for every queue."""
CARDS: Final = 8
"""GPUs of a machine whose use is shown."""
RECENT_S: Final = 300.0
"""Age of a sample up to which it shows a machine as it is now."""
STRIPS: Final = (("The last hour", timedelta(hours=1)), ("The last day", timedelta(days=1)))
MOST: Final = 1440
"""Samples of a machine: one a minute for a day."""
DRAINING: Final = 100
"""Running jobs of draining workers from which it is estimated when these are drained."""
EVENTS: Final = 10_000
"""The newest events of nodes, in which loads are counted."""
_DOWN: Final = frozenset({"dead", workers.ABSENT})


@router.get("/machines")
async def listed(request: Request, host: view.Text = None, start: view.Start = 0) -> Response:
    """Show all machines, or the one of a name, which may be `..`, as no path can have it."""
    if host is not None:
        return await one(request, host, start)
    pages: view.Pages = request.app.state.pages
    awaited = (await pages.head(request)).awaited
    return await view.live(
        request, "machines.html", shown, awaited, start,
        title="Machines", command="queue-workflows workers",
    )  # fmt: skip


@router.get("/machines/{host}")
async def one(request: Request, host: view.Segment, start: view.Start = 0) -> Response:
    """Show a machine: its workers, its models, its use in the last hour and day, its switches."""
    title = f"Machine {display.line(host, 200)}"
    command = f"queue-workflows samples --host {shlex.quote(host)} --past 1d"
    return await view.live(request, "machine.html", _one, host, start, title=title, command=command)


def shown(
    conn: db.Connection, awaited: Sequence[str], start: int = 0, most: int = view.PAGE
) -> JsonDict:
    """Return a page of `machines` with their workers; dead ones, then switched-off ones come first.

    `awaited`: machines that are listed also without a worker. `use`: in words how busy each of them
    is.
    """
    found: dict[str, Rows] = {host: [] for host in awaited}
    for row in workers.list(conn=conn):
        found.setdefault(row["host_label"], []).append(row)
    machines, pages = view.paged(sorted(found.items(), key=_trouble), start, "/machines", most=most)
    samples = _samples(conn, [host for host, _ in machines], RECENT_S, 1)
    use = {sample["host_label"]: _use(sample) for sample in samples}
    return {"machines": machines, "use": use, "pages": pages}


def _trouble(machine: tuple[str, Rows]) -> tuple[int, bool, str]:
    """Return the key by which machines are sorted."""
    host, rows = machine
    is_on = all(row["desired_state"] == "on" for row in rows)
    down = sum(row["state"] in _DOWN for row in rows) if rows else 1
    return -down, is_on, host


def _samples(conn: db.Connection, hosts: list[str], past_s: float, limit: int) -> Rows:
    """Return samples of machines, a minute each, with the host and the time among their keys."""
    rows = statements.samples.of_hosts(conn, hosts=hosts, past_s=past_s, limit=limit)
    return [
        stored_json.mapping(row["sample"])
        | {"host_label": row["host_label"], "sampled_at": row["sampled_at"]}
        for row in rows
    ]


def _use(sample: JsonDict) -> str:
    """Return in words how busy a machine is."""
    words: list[str] = []
    for name, key in (("CPU", "cpu_percent"), ("RAM", "ram_percent")):
        share = stored_json.number(sample.get(key))
        words += [] if share is None else [f"{name} {share:.0f} %"]
    for card in map(stored_json.mapping, stored_json.sequence(sample.get("gpus"))[:CARDS]):
        share, used_mb = (stored_json.number(card.get(key)) for key in ("use_pct", "vram_used_mb"))
        if share is not None and used_mb is not None:
            name = display.line(card.get("id"), 20)
            words.append(f"GPU {name} {share:.0f} %, {used_mb / strip.MB:.1f} GB")
    return "; ".join(words)


def _one(conn: db.Connection, host: str, start: int) -> JsonDict:
    """Return a machine: `every` worker, a page of them, its models, switches and strips."""
    every = [row for row in workers.list(conn=conn) if row["host_label"] == host]
    page, pages = view.paged(every, start, "/machines", host=host)
    day_s = STRIPS[-1][1].total_seconds()
    taken = _samples(conn, [host], day_s, MOST)
    if not every and not taken:
        text = f"no machine {display.line(host, 80)}: it has had no worker within a day"
        raise view.NotFound(text, near=[("all machines", "/machines")])
    now = datetime.now(timezone.utc)
    has_gpus = types.is_name(host) and any(row["queue"] == "gpu" for row in every)
    gpus = models.list(host, conn=conn) if has_gpus else []
    live = [gpu for gpu in gpus if gpu["state"] != "dead"]
    switches = _switches(conn, host, every)
    ids = [gpu["worker_id"] for gpu in live]
    loads = statements.pages.loads(conn, workers=ids, most=EVENTS) if ids else []
    return {
        "host": host,
        "every": every,
        "workers": page,
        "pages": pages,
        "gpus": {gpu["worker_id"]: gpu for gpu in gpus},
        "loads": {row["worker_id"]: row for row in loads},
        "drained_s": _drained_s(conn, page),
        "loaded": [gpu for gpu in live if stored_json.text(gpu["model"])][:CARDS],
        "known": sorted({name for gpu in live for name in gpu["known_models"]})[:200],
        "has_gpu": bool(live),
        "switches": switches[:SWITCHES],
        "left_out": len(switches[SWITCHES:]),
        "strips": [(title, strip.curves(taken, now - past, now)) for title, past in STRIPS],
        "running": _running,
    }


def _drained_s(conn: db.Connection, rows: Rows) -> dict[str, float]:
    """Return in how many seconds draining workers end their jobs, if these take the usual time.

    It is 0 for jobs that take longer. A worker with a job of unknown time is left out.
    """
    draining = {row["worker_id"]: len(row["jobs"]) for row in rows if row["state"] == "draining"}
    if not draining:
        return {}
    left: dict[str, list[float]] = {}
    for job in statements.pages.running(conn, workers=[*draining], limit=DRAINING):
        if job["usual_s"] is not None and job["elapsed_s"] is not None:
            left.setdefault(job["worker_id"], []).append(job["usual_s"] - job["elapsed_s"])
    return {
        worker: max(0.0, *each) for worker, each in left.items() if len(each) == draining[worker]
    }


def _running(rows: Rows) -> int:
    """Return how many jobs live workers run."""
    return sum(len(row["jobs"]) for row in rows if row["state"] not in _DOWN)


def _switches(conn: db.Connection, host: str, rows: Rows) -> list[tuple[str, Rows, Row | None]]:
    """Return every queue of a machine as `all`, then each, with its workers and its switch if off.

    A worker's row has only the switch in force, its queue's own or the one for every queue.
    """
    off = _off(conn, host) if any(row["desired_state"] == "off" for row in rows) else {}
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["queue"], []).append(row)
    found[workers.ALL] = rows
    queues = sorted(found, key=lambda queue: (queue != workers.ALL, queue not in off, queue))
    return [(name, found[name], off.get(name)) for name in queues]


def _off(conn: db.Connection, host: str) -> dict[str, Row]:
    """Return the switches of a machine that are off now, by their queues."""
    found = statements.workers.switched_off(conn)
    return {row["queue"]: row for row in found if row["host_label"] == host}


# --- actions -----------------------------------------------------------------------------------


@router.post("/machines/switch")
async def switch(request: Request) -> Response:
    """Switch a queue of a machine, or all of them, on or off; Undo restores the switch."""
    form = await forms.act(request, "operate")
    host, queue, to, until = (
        form.values.get(name, "") for name in ("host", "queue", "to", "until")
    )
    if to not in ("on", *workers.STOP_POLICIES):
        raise forms.Refused(422, "Choose on, pause, drain or off at once. Nothing was changed.")
    if to == "hard":
        form.confirm(await view.read(request, _ended, host, queue))

    def change() -> Row | None:
        with db.transaction() as conn:
            before = _off(conn, host).get(queue)
            if to == "on":
                workers.enable(host, queue, conn=conn)
            else:
                ends = clock.parse_until(until) if until else None
                workers.disable(host, queue, stop_policy=to, until=ends, conn=conn)
            return before

    before = await form.run(change)
    what = "every queue" if queue == workers.ALL else f"queue {display.line(queue, 80)}"
    how = {"on": "on", "hard": "off at once"}.get(to, f"off ({to})")
    text = f"{what[0].upper()}{what[1:]} of {display.line(host, 80)} is switched {how}."
    undo = None if to == "hard" else _undo(host, queue, before)
    return form.done(text, back=view.path("/machines", host=host), undo=undo)


def _ended(conn: db.Connection, host: str, queue: str) -> int:
    """Return how many running jobs end if a queue of a machine, or each, is off at once."""
    served = [row for row in workers.list(conn=conn) if row["host_label"] == host]
    return _running([row for row in served if queue in (row["queue"], workers.ALL)])


def _undo(host: str, queue: str, before: Row | None) -> forms.Action | None:
    """Return the action that restores a switch.

    Returns None for one that was off at once, which would end running jobs without a question.
    """
    fields = {"host": host, "queue": queue, "to": "on"}
    if before is not None:
        if before["stop_policy"] == "hard":
            return None
        fields["to"] = before["stop_policy"]
        fields |= {"until": before["until_at"].isoformat()} if before["until_at"] else {}
    return forms.Action("/machines/switch", "Undo", "operate", fields)


@router.post("/machines/models")
async def model(request: Request) -> Response:
    """Request that gpu workers of a machine load or unload a model."""
    form = await forms.act(request, "operate")
    host, name, act = (form.values.get(key, "") for key in ("host", "model", "act"))
    if not name:
        raise errors.InvalidConfig("choose a model: nothing was changed")
    call = models.unload if act == "unload" else models.load
    await form.run(call, host, name, worker_id=form.values.get("worker") or None)
    done = f"{'un' if act == 'unload' else ''}loads it between two jobs"
    text = f"Model {display.line(name, 120)}: {display.line(host, 80)} {done}."
    return form.done(text, back=view.path("/machines", host=host))
