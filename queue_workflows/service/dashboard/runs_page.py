"""List runs by filters, change many of them, and search by one box."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

import fastapi
import pydantic
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import config, db, errors, runs
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import clock, display
from queue_workflows.service import state
from queue_workflows.service.dashboard import forms, run_page, session, view
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row, RunPage

router = fastapi.APIRouter()
LAST: Final = 60
"""Runs of a workflow in its chart."""
NODES_READ: Final = 200
"""Nodes of each of these runs that its figures are made from."""
NODES_SHOWN: Final = 8
LIVE_READ: Final = 2_000
"""The most live nodes of a run that are counted for the question before a cancel."""
LINKS: Final = 20
"""Refused runs that a message names."""
LONGEST: Final = 1_000
"""Characters of a filter."""
STATES: Final = ("queued", "running", "completed", "failed", "cancelled")
_FILTERS: Final = (
    "workflow", "status", "text", "input", "since", "until", "schedule", "machine",
)  # fmt: skip
_BY_VALUE: Final = frozenset({"text", "input", "key", "actor"})
"""Filters that would show values by guesses."""
_ACTS: Final[Mapping[str, tuple[Callable[..., list[JsonDict]], str]]] = {
    "cancel": (runs.cancel_many, "cancelled"), "retry": (runs.retry_many, "queued"),
}  # fmt: skip
"""The call of each act on many runs, and its outcome."""


# --- lists -------------------------------------------------------------------------------------


def filters(request: Request, *names: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the filters that an address has: as texts, and as arguments, whose times are read.

    Raises `Refused` for an address that is not UTF-8, as with a lone surrogate, and for a filter by
    values in a session that sees none. Raises `InvalidConfig` for a filter without a meaning.
    """
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise forms.Refused(400, "The address has a text that is not UTF-8.") from None
    given = {name: request.query_params.get(name, "").strip() for name in names}
    query = {name: text for name, text in given.items() if text}
    if _BY_VALUE & query.keys():
        run_page.check_values(request)
    if long := [name for name, text in query.items() if len(text) > LONGEST]:
        raise errors.InvalidConfig(f"the filter {long[0]} has more than {LONGEST:,} characters")
    times = {name: clock.parse_since(query[name]) for name in ("since", "until") if name in query}
    return query, query | times


async def _place(
    at: pydantic.AwareDatetime | None = None, after: view.Text = None
) -> tuple[datetime, str] | None:
    return None if at is None else (at, after or "")


Place = Annotated[tuple[datetime, str] | None, fastapi.Depends(_place)]
"""The time and the id of the row behind which a page begins; None for the first page.

Behind a time without an id are all rows of this time.
"""


def following(query: Mapping[str, str], at: datetime, row_id: str) -> dict[str, str]:
    """Return the query of the page that begins behind this row."""
    return {**query, "at": at.isoformat(), "after": row_id}


@router.get("/runs")
async def listed(request: Request, place: Place) -> Response:
    """Show a page of runs, or for htmx, which fetches them again, the rows alone."""
    if "hx-request" in request.headers:
        return await view.fragment(request, "runs_rows.html", lambda: _values(request, place))
    values = await _values(request, place)
    query = values["filters"]
    title = f"Runs of {query['workflow']}" if "workflow" in query else "Runs"
    command = view.command("queue-workflows runs", query)
    return view.Page(request, "runs.html", title=title, command=command, **values)


async def _values(request: Request, place: tuple[datetime, str] | None) -> dict[str, Any]:
    query, given = filters(request, *_FILTERS)
    if "input" in given:
        inputs = given["input"] = _inputs(given["input"])
        # The redactor is code of the app, so it must not run in the transaction of the read.
        if await state.of(request).renders.run(view.redacted, inputs) != inputs:
            raise errors.InvalidConfig("inputs of this name are hidden, so they are not searched")
    found = await view.read(request, _read, given, place, "hx-request" not in request.headers)
    page: RunPage = found["page"]
    searched = None
    if page.next is not None and len(page.items) < view.PAGE:
        searched = f"searched {runs.EXAMINED:,} runs, back to {display.moment(page.next[0])}"
    more = following(query, *page.next) if page.next is not None else None
    ids = tuple(run["id"] for run in page.items)
    return found | {
        "runs": page.items,
        "pager": view.Pager("/runs", query, more, place is None, searched),
        "back": view.here(request),
        "filters": query,
        "states": STATES,
        "workflows": sorted(config.get_config().workflow_map),
        "selection": forms.sign_selection(request, forms.Selection("runs", ids)),
    }


def _inputs(text: str) -> JsonDict:
    """Return the inputs of `tenant=7` or of a JSON object."""
    name, sign, value = text.partition("=")
    if text.startswith("{") or not sign:
        return catalog.json_object(text)
    try:
        return {name.strip(): json.loads(value)}
    except (ValueError, RecursionError):
        return {name.strip(): value}


def _read(
    conn: db.Connection,
    given: dict[str, Any],
    place: tuple[datetime, str] | None,
    has_chart: bool,
) -> dict[str, Any]:
    workflow = given.pop("workflow", None)
    page = runs.page(limit=view.PAGE, workflow_name=workflow, before=place, conn=conn, **given)
    last, nodes = list[Row](), list[Row]()
    if workflow and has_chart:
        last = statements.pages.last_runs(conn, workflow=workflow, limit=LAST)
        ids = [row["id"] for row in last]
        nodes = statements.pages.nodes_of_runs(conn, ids=ids, most=NODES_READ, limit=NODES_SHOWN)
    return {"page": page, "last": last, "nodes": nodes}


# --- change many -------------------------------------------------------------------------------


@router.post("/runs/chosen")
async def chosen(request: Request) -> Response:
    """Ask whether to cancel or retry the chosen runs, and describe the effect."""
    form = await forms.act(request, "submit", kind="runs")
    verb, back = form.values.get("verb", ""), form.back
    if verb not in _ACTS:
        raise forms.Refused(422, "Choose an action for the runs.")
    assert form.selection is not None
    if "id" not in form.values and "whole" not in form.values:
        raise forms.Refused(422, "No run was chosen: check the boxes of runs, or the one of all.")
    ids = [*form.selection.ids]
    found = await view.read(request, statements.pages.runs_to_change, ids=ids, most=LIVE_READ)
    takes = [row for row in found if _takes(verb, row["status"])]
    kept = tuple(row["id"] for row in takes)
    return view.Page(
        request, "runs_chosen.html", title=f"{verb.capitalize()} runs", back=back, verb=verb,
        command=f"queue-workflows {verb} {' '.join(shlex.quote(one) for one in kept[:3])}",
        runs=takes, left_out=[row for row in found if row not in takes],
        selection=forms.sign_selection(request, forms.Selection("runs", kept)),
    )  # fmt: skip


def _takes(verb: str, status: str) -> bool:
    is_over = status in TERMINAL_RUN_STATUSES
    return is_over and status != "completed" if verb == "retry" else not is_over


@router.post("/runs/{verb}")
async def change(request: Request, verb: Literal["cancel", "retry"]) -> Response:
    """Cancel the runs of a selection, or run them again."""
    call, outcome = _ACTS[verb]
    form = await forms.act(request, "submit", kind="runs")
    assert form.selection is not None
    if verb == "cancel":
        form.confirm(len(form.selection.ids))
    done = await form.run(call, form.selection.ids)
    refused = [one["id"] for one in done if one["outcome"] != outcome]
    links = [(run_id, view.path("/runs/", run_id)) for run_id in refused[:LINKS]]
    return form.done(summed_up(done, outcome), back=form.back, links=links)


def summed_up(done: Sequence[Row], outcome: str, words: str = "") -> str:
    """Return how many have this outcome, in these `words`, how many were refused, and why."""
    refused = [one for one in done if one["outcome"] != outcome]
    text = f"{len(done) - len(refused):,} {words or outcome}"
    if not refused:
        return text
    return f"{text}, {len(refused):,} refused: {display.line(refused[0]['reason'])}"


# --- search ------------------------------------------------------------------------------------


@router.get("/search")
async def search(
    request: Request, q: Annotated[str, fastapi.Query(max_length=200)] = ""
) -> Response:
    """Go to the run, job, workflow, machine, task or key of this name; else list runs with it.

    The beginning of an id is enough if only one run or job has it. A session that sees no values
    searches neither keys nor texts.
    """
    filters(request)  # refuses a lone surrogate
    text, sees = q.strip(), session.of(request).sees_values
    place: tuple[str, dict[str, str]] | None = "/runs", {}
    if text:
        place = await view.read(request, _found, text, sees)
    if place is None and not sees:
        raise view.NotFound(f"Nothing has the id or the name {text!r}.")
    path, query = place or ("/runs", {"text": text})
    return RedirectResponse(session.url(request, path, **query), 303)


def _found(conn: db.Connection, text: str, sees: bool) -> tuple[str, dict[str, str]] | None:
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
        return "/machines", {"host": text}
    if len(text) >= runs.ID_CHARACTERS:
        begun = run_page.ids_with(conn, text, "run", "node job", "ingest job")
        if len(begun) == 1:
            return begun[0][1], {}
    named = statements.pages.named(conn, text=text, most=runs.EXAMINED)
    if named is None or not (sees or named["field"] == "task"):
        return None
    if named["id"] is not None:
        return view.path("/jobs/", named["id"]), {}
    return "/jobs", {named["field"]: text}
