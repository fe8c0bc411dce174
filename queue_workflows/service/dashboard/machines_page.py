"""Show machines with their workers, models and use, switch them, and load or unload models."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any, Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, errors, models, types, workers
from queue_workflows.db import statements
from queue_workflows.runtime import clock, display, stored_json
from queue_workflows.service.dashboard import forms, strip, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
HOSTS: Final = 100
"""Machines on a page."""
RECENT_S: Final = 300.0
"""Age of a sample up to which it shows a machine as it is now."""
STRIPS: Final = (("The last hour", timedelta(hours=1)), ("The last day", timedelta(days=1)))
MOST: Final = 1440
"""Samples of a machine: one a minute for a day."""
_DOWN: Final = frozenset({"dead", workers.ABSENT})
_OFF: Final = {
    "pause": "Running jobs end, and models stay loaded.",
    "drain": "Running jobs end, then the models are unloaded.",
}


@router.get("/machines")
async def listed(request: Request) -> Response:
    """Show all machines."""
    found = await view.read(request, _read)
    command = "queue-workflows workers"
    return view.page(request, "machines.html", title="Machines", command=command, **found)


@router.get("/machines-rows")
async def rows(request: Request) -> Response:
    """Return the machines alone."""
    return await view.fragment(request, "machines_rows.html", lambda: view.read(request, _read))


@router.get("/machines/{host}")
async def one(request: Request, host: view.Segment) -> Response:
    """Show a machine: its workers, its models, its use in the last hour and day, its switches."""
    found = await view.read(request, _one, host)
    title = f"Machine {display.line(host, 200)}"
    command = f"queue-workflows samples --host {shlex.quote(host)} --past 1d"
    found["switches"] = [_switch(host, queue, of) for queue, of in found["queues"].items()]
    return view.page(request, "machine.html", title=title, command=command, **found)


@router.get("/machines/{host}/workers")
async def live(request: Request, host: view.Segment) -> Response:
    """Return the workers of a machine alone."""

    def read(conn: db.Connection) -> JsonDict:
        return {"machine": {"host": host, "workers": _machines(conn, host).get(host, [])}}

    return await view.fragment(request, "machine_workers.html", lambda: view.read(request, read))


def _machines(conn: db.Connection, host: str | None = None) -> dict[str, list[Row]]:
    """Return the workers of each machine, or of one; `gpu` of each is its row of `models.list`."""
    by_worker = {row["worker_id"]: row for row in models.list(conn=conn)}
    found: dict[str, list[Row]] = {}
    for row in workers.list(conn=conn):
        if host in (None, row["host_label"]):
            own = row | {"gpu": by_worker.get(row["worker_id"])}
            found.setdefault(row["host_label"], []).append(own)
    return found


def _samples(conn: db.Connection, hosts: list[str], past_s: float, limit: int) -> list[Row]:
    """Return samples of machines, a minute each, with the host and the time among their keys."""
    rows = statements.samples.of_hosts(conn, hosts=hosts, every_s=60, past_s=past_s, limit=limit)
    return [
        stored_json.mapping(row["sample"])
        | {"host_label": row["host_label"], "sampled_at": row["sampled_at"]}
        for row in rows
    ]


def _read(conn: db.Connection) -> JsonDict:
    """Return `machines`, the ones with dead workers first: each with its workers and its use."""
    found = _machines(conn)
    names = [*found][:HOSTS]
    use = {row["host_label"]: row for row in _samples(conn, names, RECENT_S, 1)}
    machines: list[JsonDict] = [
        {
            "host": name,
            "workers": found[name],
            "use": use.get(name),
            "running": sum(len(row["jobs"]) for row in found[name]),
            "down": sum(row["state"] in _DOWN for row in found[name]),
            "is_off": any(row["desired_state"] == "off" for row in found[name]),
        }
        for name in names
    ]
    machines.sort(key=lambda each: (-each["down"], not each["is_off"], each["host"]))
    return {"machines": machines, "left_out": len(found) - len(names)}


def _one(conn: db.Connection, host: str) -> JsonDict:
    """Return a machine: its workers, by queue too, its strips, and the models that it may load."""
    rows = _machines(conn, host).get(host, [])
    is_name = types.is_name(host)
    taken = _samples(conn, [host], STRIPS[-1][1].total_seconds(), MOST) if is_name else []
    if not rows and not taken:
        text = f"no machine {display.line(host, 80)}: it has had no worker within a day"
        raise view.NotFound(text, near=[("all machines", "/machines")])
    now = datetime.now(timezone.utc)
    queues: dict[str, list[Row]] = {workers.ALL: rows}
    for row in rows:
        if row["queue"] != workers.ALL:
            queues.setdefault(row["queue"], []).append(row)
    gpus = [row["gpu"] for row in rows if row["gpu"] and row["state"] != "dead"]
    return {
        "machine": {"host": host, "workers": rows},
        "queues": queues,
        "strips": [(title, strip.curves(taken, now - past, now)) for title, past in STRIPS],
        "known": sorted({name for gpu in gpus for name in gpu["known_models"]})[:200],
        "loaded": sorted({gpu["model"] for gpu in gpus if gpu["model"]}),
        "unload": [_unload(host, gpu) for gpu in gpus if gpu["model"]],
        "has_gpu": bool(gpus),
    }


# --- actions -----------------------------------------------------------------------------------


def _switch(host: str, queue: str, rows: Iterable[Row]) -> JsonDict:
    """Return a queue of a machine with its switch and the actions that change it."""
    own = [row for row in rows if row["state"] not in _DOWN]
    jobs = sum(len(row["jobs"]) for row in own)
    off = next((row for row in rows if row["desired_state"] == "off"), None)
    what = _named(queue)

    def action(to: str, label: str, kind: Any, text: str) -> forms.Action:
        fields = {"queue": queue, "to": to}
        where, asks = view.path("/machines/", host, "switch"), kind == "ends"
        return forms.Action(where, label, "operate", fields, kind, text, asks_reason=asks)

    actions = [action("on", "On", "now", "")] if off else []
    if off is None or off["stop_policy"] != "hard":
        actions += [
            action(policy, label, "now", text)
            for policy, label, text in (
                ("pause", "Pause", _OFF["pause"]), ("drain", "Drain", _OFF["drain"]),
            )
            if off is None or off["stop_policy"] != policy
        ]  # fmt: skip
        back = "goes back to its queue" if jobs == 1 else "go back to their queues"
        ends = "1 process ends" if len(own) == 1 else f"{len(own)} processes end"
        text = (
            f"Switch {what} of {display.line(host, 80)} off at once: "
            f"{display.counted(jobs, 'running job')} {back}, {ends}, and loaded models are lost."
        )
        actions.append(action("hard", "Off at once", "ends", text))
    return {"queue": queue, "off": off, "running": jobs, "actions": actions}


def _unload(host: str, gpu: Row) -> forms.Action:
    name = display.line(gpu["model"], 60)
    load = f" (it took {display.duration(gpu['load_s'])})" if gpu["load_s"] else ""
    text = (
        f"Unload {name} from process {gpu['pid']} of {display.line(host, 80)} between two jobs. "
        f"The next job that needs it loads it again{load}."
    )
    fields = {"act": "unload", "model": gpu["model"], "worker": gpu["worker_id"]}
    to = view.path("/machines/", host, "models")
    return forms.Action(to, f"Unload {name}", "operate", fields, "ends", text)


@router.post("/machines/{host}/switch")
async def switch(request: Request, host: view.Segment) -> Response:
    """Switch a queue of a machine, or all of them, on or off; Undo restores the switch."""
    form = await forms.act(request, "operate")
    queue, to = form.values.get("queue", ""), form.values.get("to", "")
    if to not in ("on", *workers.STOP_POLICIES):
        raise forms.Refused(422, "Choose on, pause, drain or off at once. Nothing was changed.")
    until = form.values.get("until") or None

    def change() -> Row | None:
        with db.transaction() as conn:
            before = statements.controls.get(conn, host=host, queue=queue)
            if to == "on":
                workers.enable(host, queue, conn=conn)
            else:
                ends = None if until is None else clock.parse_until(until)
                workers.disable(host, queue, stop_policy=to, until=ends, conn=conn)
            return before

    before = await form.run(change)
    undo = None if to == "hard" else _undo(host, queue, before)
    what = _named(queue)
    how = {"on": "on", "hard": "off at once"}.get(to, f"off ({to})")
    text = f"{what[0].upper()}{what[1:]} of {display.line(host, 80)} is switched {how}."
    return form.done(text, back=view.path("/machines/", host), undo=undo)


def _named(queue: str) -> str:
    return "every queue" if queue == workers.ALL else f"queue {display.line(queue, 80)}"


def _undo(host: str, queue: str, before: Row | None) -> forms.Action | None:
    """Return the action that restores a switch. One whose time has passed is on.

    Returns None for one that was off at once, which would end running jobs without a question.
    """
    fields = {"queue": queue, "to": "on"}
    if before is not None and before["desired_state"] == "off":
        until = before["until_at"]
        if until is None or until > datetime.now(timezone.utc):
            if before["stop_policy"] == "hard":
                return None
            fields["to"] = before["stop_policy"]
            fields |= {} if until is None else {"until": until.isoformat()}
    return forms.Action(view.path("/machines/", host, "switch"), "Undo", "operate", fields)


@router.post("/machines/{host}/models")
async def model(request: Request, host: view.Segment) -> Response:
    """Request that gpu workers of a machine load or unload a model."""
    form = await forms.act(request, "operate")
    name, worker = form.values.get("model", ""), form.values.get("worker") or None
    if form.values.get("act") == "unload":
        await form.run(models.unload, host, name or None, worker_id=worker)
        done = "unloads it between two jobs"
    elif name:
        await form.run(models.load, host, name, worker_id=worker)
        done = "loads it between two jobs"
    else:
        raise errors.InvalidConfig("choose a model: nothing was changed")
    text = f"Model {display.line(name, 120)}: {display.line(host, 80)} {done}."
    return form.done(text, back=view.path("/machines/", host))
