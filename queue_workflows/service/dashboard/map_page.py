"""Show the items of a map: a strip by position, the failed ones first, by key and by error."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, failures
from queue_workflows.admin import stored_graph
from queue_workflows.dag import item_ids
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import forms, run_page, session, strip, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()
GROUPED: Final = 10_000
"""Failed items that are grouped by their errors, the first ones."""


@router.get("/runs/{run_id}/map")
async def one_map(
    request: Request,
    run_id: view.Segment,
    node: run_page.Name,
    state: Literal["done", "failed", "open", "waiting", "all"] | None = None,
    q: view.Text = None,
    error: view.Text = None,
    key: view.Text = None,
    start: Annotated[int, fastapi.Query(ge=0, le=1_000_000_000)] = 0,
) -> Response:
    """Show the items of a map: the failed ones first, grouped by error, by position or key."""
    sees = session.of(request).sees_values
    chosen = {"state": state, "q": q or None, "error": error if sees else None, "start": start}
    found = await view.read(request, _map, run_id, node, key, chosen, sees)
    title = f"Map {node} of run {run_id}"
    command = run_page.command(run_id, item=key) if key else run_page.command(run_id)
    actions = _actions(found) if found["run"]["over"] else []
    return view.Page(
        request, "run_map.html", title=title, command=command, actions=actions, **found
    )


def _map(
    conn: db.Connection, run_id: str, name: str, key: str | None, chosen: JsonDict, sees: bool
) -> JsonDict:
    head = run_page.run_row(conn, run_id)
    own = statements.run_page.map(conn, run_id=run_id, map=name)
    if own is None:
        text = f"run {display.line(run_id, 80)} has no map {display.line(name, 120)}, or has not "
        text += "opened it yet"
        raise view.NotFound(text, near=[(f"run {run_id}", view.path("/runs/", run_id))])
    if head["over"]:  # open items wait until the run is retried
        own |= {"open": 0, "next_position": 0}
    own["waiting"] = max(0, own["total"] - own["done"] - own["failed"] - own["open"])
    where: JsonDict = {"run_id": run_id, "map": name, "opened": own["next_position"]}
    found: JsonDict = {"run": head, "map": own, "key": key, "rows": []}
    if key is not None:
        item = statements.run_page.item(conn, **where, key=key, most=run_page.MOST_BYTES)
        return found | {"item": item, "nodes": _nodes(conn, run_id, name, key)}
    state = chosen["state"] or ("failed" if own["failed"] else "all")
    buckets = statements.run_page.buckets(
        conn, **where, buckets=max(1, min(strip.BUCKETS, own["total"])), total=max(1, own["total"])
    )
    worst = {row["bucket"]: row["state"] for row in buckets}
    grouped = min(GROUPED, own["failed"]) if sees else 0
    groups = statements.run_page.groups(
        conn, run_id=run_id, map=name, most=grouped, limit=view.PAGE
    )
    # An address has the id of a group, as its signature may be a secret that no page shows.
    ids = {failures.group_id(each["signature"] or ""): each["signature"] for each in groups}
    rows = statements.run_page.items(
        conn, **where, state=None if state == "all" else state, text=chosen["q"],
        signature=ids.get(chosen["error"], chosen["error"]),
        start=chosen["start"], limit=view.PAGE + 1,
    )  # fmt: skip
    query = {"node": name, "state": state, "q": chosen["q"], "error": chosen["error"]}
    following = query | {"start": rows[view.PAGE]["position"]} if len(rows) > view.PAGE else None
    there = view.path("/runs/", run_id, "map")
    return found | {
        "rows": rows[:view.PAGE], "chosen": chosen | {"state": state}, "groups": groups,
        "grouped": grouped, "ids": [*ids], "pieces": strip.pieces(worst, own["total"]),
        "pages": view.Pager(there, query, following, chosen["start"] == 0),
    }  # fmt: skip


def _nodes(conn: db.Connection, run_id: str, name: str, key: str) -> list[JsonDict]:
    """Return the first nodes of an item with their states, in the order of the map's body."""
    entries = stored_graph.all_entries(statements.runs.definition(conn, run_id=run_id))
    begin = f"{stored_graph.without_keys(name)[0]}[]/"
    inner = [each.removeprefix(begin) for each in entries if each.startswith(begin)]
    names = [f"{item_ids.folder(name, key)}/{each}" for each in inner if "[" not in each]
    return run_page.states_of(conn, run_id, names[: view.PAGE])


def _actions(found: JsonDict) -> list[forms.Action]:
    """Return the retry of an item, or of all failed items of a map, of a run that is over."""
    head, own, key = found["run"], found["map"], found["key"]
    if key is not None and found["item"] is not None:
        item = item_ids.folder(own["node_id"], key)
        text = f"Run item {display.line(item, 120)} and all that depends on it again."
        return [run_page.retried(head, "Retry this item", text, item)]
    if head["status"] == "completed" or not own["failed"]:
        return []
    shown, items = display.line(head["id"], 80), display.counted(own["failed"], "failed item")
    text = f"Run the failed nodes of run {shown} again, with {items} of this map."
    return [run_page.retried(head, "Retry failed items", text)]
