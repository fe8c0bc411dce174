"""List runs by filters, change many of them, and search by one box."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import fastapi
import pydantic
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import config, db, errors, runs
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import clock, display
from queue_workflows.service.dashboard import forms, run_page, session, view
from queue_workflows.types import JsonDict, Row, Rows, RunPage

router = fastapi.APIRouter()
PAGE: Final = 50
LAST: Final = 60
"""Runs of a workflow in its chart."""
NODES_READ: Final = 200
"""Nodes of each of these runs that its figures are made from."""
NODES_SHOWN: Final = 8
LIVE_READ: Final = 2_000
"""Live nodes of a run that a question counts."""
LINKS: Final = 20
"""Refused runs that a message names."""
STATES: Final = ("queued", "running", "completed", "failed", "cancelled")
_Text = Annotated[str, fastapi.Query(max_length=1000)]
_VERBS: Final[Mapping[str, str]] = {"cancel": "Cancel", "retry": "Retry"}


class Filters:
    """The filters of the list as the address has them, and as `runs.page` takes them."""

    def __init__(self, fields: dict[str, str], before: tuple[datetime, str] | None) -> None:
        self.fields, self.before = fields, before
        self.query = {name: text for name, text in fields.items() if text}
        """Those that are set, for addresses."""

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `runs.page`; raise `InvalidConfig` for a filter that is none."""
        query = self.query
        inputs = _inputs(query["input"]) if "input" in query else None
        if inputs is not None and view.redacted(inputs) != inputs:
            raise errors.InvalidConfig("inputs of this name are hidden, so they are not searched")
        return {
            "workflow_name": query.get("workflow"),
            "status": query.get("status"),
            "text": query.get("text"),
            "input": inputs,
            "since": clock.parse_since(query["since"]) if "since" in query else None,
            "until": clock.parse_since(query["until"]) if "until" in query else None,
            "before": self.before,
        }

    def command(self) -> str:
        """Return the command that lists the same."""
        return view.command("queue-workflows runs", self.query)


def _inputs(text: str) -> JsonDict:
    """Return the inputs of `tenant=7` or of a JSON object."""
    name, sign, value = text.partition("=")
    if text.startswith("{") or not sign:
        return catalog.json_object(text)
    try:
        return {name.strip(): json.loads(value)}
    except (ValueError, RecursionError):
        return {name.strip(): value}


async def _filters(
    workflow: _Text = "",
    status: _Text = "",
    text: Annotated[str, fastapi.Query(max_length=200)] = "",
    input: Annotated[str, fastapi.Query(max_length=2000)] = "",  # noqa: A002  as the command
    since: Annotated[str, fastapi.Query(max_length=40)] = "",
    until: Annotated[str, fastapi.Query(max_length=40)] = "",
    at: pydantic.AwareDatetime | None = None,
    after: _Text = "",
) -> Filters:
    given = {"workflow": workflow, "status": status, "text": text, "input": input,
             "since": since, "until": until}  # fmt: skip
    fields = {name: each.strip() for name, each in given.items()}
    return Filters(fields, (at, after) if at is not None and after else None)


Asked = Annotated[Filters, fastapi.Depends(_filters)]


@router.get("/runs")
async def listed(request: Request, asked: Asked) -> Response:
    """Show a page of runs."""
    values = await _values(request, asked)
    title = f"Runs of {asked.query['workflow']}" if "workflow" in asked.query else "Runs"
    return view.page(request, "runs.html", title=title, command=asked.command(), **values)


@router.get("/runs-rows")
async def rows(request: Request, asked: Asked) -> Response:
    """Return the rows of a page of runs."""
    return await view.fragment(request, "runs_rows.html", lambda: _values(request, asked))


async def _values(request: Request, asked: Filters) -> dict[str, Any]:
    if {"text", "input"} & asked.query.keys():
        run_page.check_values(request)
    found = await view.read(request, _read, asked.keywords())
    page: RunPage = found["page"]
    query, before = asked.query, asked.before
    place = query | ({"at": before[0].isoformat(), "after": before[1]} if before else {})
    following = searched = None
    if page.next is not None:
        at, run_id = page.next
        following = query | {"at": at.isoformat(), "after": run_id}
        if len(page.items) < PAGE:
            searched = f"searched {runs.EXAMINED:,} runs, back to {display.moment(at)}"
    ids = tuple(run["id"] for run in page.items)
    chosen = forms.sign_selection(request, forms.Selection("runs", ids)) if ids else ""
    workflows = sorted(config.get_config().workflow_map)
    return found | {
        "runs": page.items,
        "pager": view.Pager("/runs", query, following, before is None, searched),
        "place": place,
        "back": "/runs" + (f"?{urlencode(place)}" if place else ""),
        "words": ", ".join(f"{name} {text}" for name, text in query.items()),
        "filters": asked.fields,
        "filtered": bool(asked.query),
        "states": STATES,
        "workflows": workflows,
        "selection": chosen,
    }


def _read(conn: db.Connection, keywords: JsonDict) -> dict[str, Any]:
    found: dict[str, Any] = {
        "page": runs.page(limit=PAGE, conn=conn, **keywords),
        "chart": None,
        "nodes": [],
    }
    workflow = keywords["workflow_name"]
    if workflow is not None and payload.is_storable(workflow):
        last = statements.pages.last_runs(conn, workflow=workflow, limit=LAST)
        if last:
            found["chart"] = _chart(last)
            ids = [row["id"] for row in last]
            found["nodes"] = statements.pages.nodes_of_runs(
                conn, ids=ids, most=NODES_READ, limit=NODES_SHOWN
            )
    return found


def _chart(last: Rows) -> dict[str, Any]:
    """Return the bars of the last runs, the oldest first, and the usual and the long duration."""
    times = [row["elapsed_s"] for row in last if row["status"] == "completed"]
    ended = sorted(seconds for seconds in times if seconds is not None)  # an app may set no start
    took = [row["elapsed_s"] for row in last if row["finished_at"] and row["elapsed_s"]]
    longest = max(took, default=0.0)
    cuts = statistics.quantiles(ended, n=20, method="inclusive") if len(ended) > 1 else ended * 19
    return {
        "bars": [row | {"share": _share(row["elapsed_s"], longest)} for row in reversed(last)],
        "longest_s": longest,
        "p50_s": cuts[9] if ended else None,
        "p95_s": cuts[18] if ended else None,
        "failed": sum(row["status"] == "failed" for row in last),
    }


def _share(seconds: float | None, longest: float) -> float:
    return max(0.03, min(1.0, (seconds or 0.0) / longest)) if longest > 0 else 0.03


# --- change many -------------------------------------------------------------------------------


@router.post("/runs/chosen")
async def chosen(request: Request) -> Response:
    """Ask whether to cancel or retry the chosen runs, and describe the effect."""
    form = await forms.act(request, "submit", kind="runs")
    verb, back = form.values.get("verb", ""), form.back
    if verb not in _VERBS:
        raise forms.Refused(422, "Choose an action for the runs.")
    assert form.selection is not None
    if "id" not in form.values and "whole" not in form.values:
        raise forms.Refused(422, "No run was chosen: check the boxes of runs, or the one of all.")
    ids = form.selection.ids
    found = await view.read(request, _to_change, ids)
    over = [row for row in found if row["status"] in ("completed", "failed", "cancelled")]
    takes = over if verb == "retry" else [row for row in found if row not in over]
    takes = [row for row in takes if row["status"] != "completed"]
    kept = forms.Selection("runs", tuple(row["id"] for row in takes), count=len(takes))
    fields = {"selection": forms.sign_selection(request, kept), "back": back}
    question = forms.Action(
        f"/runs/{verb}", f"{_VERBS[verb]} {display.counted(len(takes), 'run')}", "submit", fields,
        kind="ends" if verb == "cancel" else "makes", text=_effect(verb, takes, found),
        count=len(takes), asks_reason=True,
    )  # fmt: skip
    return view.page(
        request, "runs_chosen.html", title=f"{_VERBS[verb]} runs", back=back, runs=takes,
        command=f"queue-workflows {verb} {' '.join(shlex.quote(row['id']) for row in takes[:3])}",
        left_out=[row for row in found if row not in takes], question=question,
    )  # fmt: skip


def _to_change(conn: db.Connection, ids: Sequence[str]) -> Rows:
    return statements.pages.runs_to_change(conn, ids=[*ids], most=LIVE_READ)


def _effect(verb: str, takes: Rows, found: Rows) -> str:
    """Return the effect of an act on these runs in a sentence."""
    many = display.counted(len(takes), "run")
    out = len(found) - len(takes)
    rest = f" {out} of the chosen ones {'is' if out == 1 else 'are'} left out." if out else ""
    if verb == "retry":
        return f"Run {many} again: completed nodes keep their outputs.{rest}"
    waits, runs_, children = (
        sum(row[name] for row in takes) for name in ("waiting", "running", "children")
    )
    nodes = display.counted(waits, "node")
    parts = [f"{nodes} {'waits and is' if waits == 1 else 'wait and are'} cancelled"]
    if runs_:
        parts.append(f"{runs_} {'runs and is' if runs_ == 1 else 'run and are'} asked to stop")
    if children:
        parts.append(f"{display.counted(children, 'child run')} too")
    return f"Cancel {many}: {', '.join(parts)}.{rest}"


@router.post("/runs/cancel")
async def cancel(request: Request) -> Response:
    """Cancel the runs of a selection."""
    return await _change(request, runs.cancel_many, "cancelled")


@router.post("/runs/retry")
async def retry(request: Request) -> Response:
    """Run the runs of a selection again."""
    return await _change(request, runs.retry_many, "queued")


async def _change(request: Request, call: Any, outcome: str) -> Response:
    form = await forms.act(request, "submit", kind="runs")
    assert form.selection is not None
    if call is runs.cancel_many:
        form.confirm(len(form.selection.ids))
    found: Sequence[Row] = await form.run(call, form.selection.ids)
    done = sum(one["outcome"] == outcome for one in found)
    refused = [one for one in found if one["outcome"] != outcome]
    message = f"{done} {outcome}"
    if refused:
        message += f", {len(refused)} refused: {display.line(refused[0]['reason'])}"
    links = [(one["id"], view.path("/runs/", one["id"])) for one in refused[:LINKS]]
    return form.done(message, back=form.back, links=links)


# --- search ------------------------------------------------------------------------------------


@router.get("/search")
async def search(
    request: Request, q: Annotated[str, fastapi.Query(max_length=200)] = ""
) -> Response:
    """Go to the run, job, workflow or machine of this name; else list the runs with the text."""
    text = q.strip()
    place: tuple[str, dict[str, str]] | None = "/runs", {}
    if text:
        place = await view.read(request, _place, text)
    if place is None and not session.of(request).sees_values:
        raise view.NotFound(f"Nothing has the id or the name {text!r}.")
    path, query = place or ("/runs", {"text": text})
    return RedirectResponse(session.url(request, path, **query), 303)


def _place(conn: db.Connection, text: str) -> tuple[str, dict[str, str]] | None:
    if not payload.is_storable(text):
        return None
    found = statements.overview.find(conn, id=text, jobs_first=False)
    if found is not None:
        if found["kind"] == "run":
            return view.path("/runs/", text), {}
        if found["kind"] == "node job":
            return view.path("/runs/", found["run_id"]), {"node": found["name"]}
        return view.path("/jobs/", text), {}
    if statements.pages.last_runs(conn, workflow=text, limit=1):
        return "/runs", {"workflow": text}
    if text in statements.controls.known_hosts(conn):
        return view.path("/machines/", text), {}
    return None
