"""Show failures in groups of one cause, retry the jobs of a group, and mark groups as seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import fastapi
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, failures, jobs
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import forms, run_page, runs_page, session, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 25
"""Groups, and members of a group, on a page."""
VISIT: Final = "queue_workflows_failures"
"""The cookie with the time of the visit before this one, and of the last request."""
VISIT_S: Final = 1800.0
"""A request that comes so much later than the one before begins another visit."""
NEW_S: Final = 3600.0
"""A cause whose first failure is not older is marked as new, also on a first visit."""
_FILTERS: Final = ("since", "until", "queue", "workflow", "machine", "text", "newest", "seen")
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)")
"""The type of an error; any other text before a colon may be a value."""
_DETAILS: Final = re.compile(r"'…'|/…|[^\W\d_]*#|[^\w\s]|_")
"""The parts of the message of a signature that do not name the fault."""


def _asked(request: Request) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the filters of an address, and the arguments of `failures.list` for them."""
    query, given = runs_page.filters(request, *_FILTERS)
    number = query.get("newest", str(failures.NEWEST))
    given["newest"] = int(number) if number.isdecimal() else 0  # which is refused
    return query, given | {"seen": "seen" in query}


def _command(words: str, query: Mapping[str, str]) -> str:
    texts = {name: text for name, text in query.items() if name != "seen"}
    return view.command(f"queue-workflows failures {words}", texts)


def paged(
    where: str, query: Mapping[str, str], rows: Sequence[Row], place: tuple[datetime, str] | None
) -> tuple[Sequence[Row], view.Pager]:
    """Return the failures of the page that begins behind a place, and its links.

    The order of `rows` is that of `failures.list`.
    """
    if place is not None:
        rows = [row for row in rows if (place[0], row["id"]) > (row["at"], place[1])]
    more = None
    if len(rows) > PAGE:
        more = runs_page.following(query, rows[PAGE - 1]["at"], rows[PAGE - 1]["id"])
    return rows[:PAGE], view.Pager(where, query, more, place is None)


@router.get("/failures")
async def listed(request: Request, place: runs_page.Place) -> Response:
    """Show the groups of the newest failures, the one that failed last first."""
    query, given = _asked(request)
    found = await view.read(request, _read, given)
    before = _last_visit(request, found.now)
    # If the first failure of a group was perhaps not read, it is unknown whether it is new.
    has_all = found.is_whole and "since" not in given
    new_after, recent_after = (
        at if at is not None and (has_all or found.begin <= at) else None
        for at in (before, found.now - timedelta(seconds=NEW_S))
    )
    until = given.get("until")
    newest = [group["members"][0] | {"group": group} for group in found.groups]
    shown, pages = paged("/failures", query, newest, place)
    # All groups of a page together name as many jobs as the page of one.
    most = jobs.BATCH // max(1, len(shown))
    response = view.Page(
        request, "failures.html", title="Failures", found=found, filter=query, pages=pages,
        command=_command("list", query) + (" --all" if given["seen"] else ""),
        groups=[_shown(request, row["group"], most) for row in shown], most=failures.MOST,
        new_after=new_after, recent_after=recent_after,
        is_first_visit=before is None, total=sum(each["count"] for each in found.groups),
        most_of_bar=max((max(row["group"]["bars"]) for row in shown), default=0),
        end=found.now - until if isinstance(until, timedelta) else until or found.now,
    )  # fmt: skip
    value = f"{int((before or found.now).timestamp())}.{int(found.now.timestamp())}"
    attributes = request.app.state.sessions.attributes(request)
    response.set_cookie(VISIT, value, max_age=session.LASTS_S, **attributes)
    return response


def _read(conn: db.Connection, given: dict[str, Any]) -> failures.Found:
    return failures.list(conn=conn, **given)


def _last_visit(request: Request, now: datetime) -> datetime | None:
    """Return when the visit before this one ended; None for a first visit."""
    times = request.cookies.get(VISIT, "").split(".")
    try:
        before, last = (datetime.fromtimestamp(int(each), now.tzinfo) for each in times)
    except (ValueError, OverflowError, OSError):
        return None
    return last if (now - last).total_seconds() > VISIT_S else before


def _shown(request: Request, group: JsonDict, most: int) -> JsonDict:
    """Return a group with the selections of its acts.

    `failed`: the ids of its jobs, of which the `most` newest ones are `retried`. `kind`: the type
    of its error, which the scope `look` sees instead of its signature. `has_nodes`: whether some
    are nodes, which a retry queues with their run. `example`: the newest error, if the message of
    the signature does not name the fault; else None.
    """
    kind, _, rest = group["signature"].partition(":")
    message = rest or group["signature"]
    example = None if _DETAILS.sub("", message).strip() else group["members"][0]["error"]
    kind = kind if _TYPE.fullmatch(kind) else "an error"
    failed = [row["id"] for row in group["members"] if row["kind"] != "schedule"]
    selections = {
        "retry": forms.Selection("failures", tuple(failed[:most])),
        "sample": forms.Selection("failures", tuple(failed[:1])),
        "mark": forms.Selection("failures seen", (group["id"],), group["last_at"]),
    }
    signed = {act: forms.sign_selection(request, each) for act, each in selections.items()}
    has_nodes = any(row["kind"] == "node job" for row in group["members"])
    return group | {
        "kind": kind, "failed": failed, "retried": failed[:most], "has_nodes": has_nodes,
        "signed": signed, "example": None if example == group["signature"] else example,
    }  # fmt: skip


@router.get("/failures/news")
async def news(request: Request, at: pydantic.AwareDatetime) -> Response:
    """Return how many jobs that fit have failed since a page was made."""
    query, given = _asked(request)

    def read(conn: db.Connection) -> JsonDict:
        found = _read(conn, given | {"since": at, "newest": 1000})
        count = sum(group["count"] for group in found.groups if group["last_at"] > at)
        text = display.counted(count, "more failure") if count else ""
        return {"count": text, "at": at, "to": "/failures", "query": query}

    return await view.fragment(request, "news.html", lambda: view.read(request, read))


@router.get("/failures/{group}")
async def one(request: Request, group: str, place: runs_page.Place, ids: bool = False) -> Response:
    """Show the failures of a group, the newest first, and the traceback of the newest.

    `ids`: return the ids of its jobs as a text, one a line. The scope `look` sees no group, as a
    guessed error has the id of its group.
    """
    run_page.check_values(request)
    query, given = _asked(request)

    def read(conn: db.Connection) -> tuple[failures.Found, JsonDict | None, str | None]:
        found = _read(conn, given | {"seen": True})
        own = next((each for each in found.groups if each["id"] == group), None)
        trace = failures.traceback(own["members"][0], conn=conn) if own else None
        return found, own, trace

    found, own, trace = await view.read(request, read)
    if own is None:
        raise view.NotFound(
            f"no group {display.line(group, 40)} among the newest {found.examined:,} failures: "
            "its jobs were retried or deleted, or they failed earlier",
            near=[("all failures", "/failures")],
        )
    shown = _shown(request, own, jobs.BATCH)
    if ids:
        text = "".join(f"{each}\n" for each in shown["failed"])
        return run_page.download(text, f"failures-{group}.txt")
    rows, pages = paged(f"/failures/{group}", query, own["members"], place)
    return view.Page(
        request, "failure.html", title="Failures of one cause", found=found, filter=query,
        command=_command(f"show {group}", query), group=shown, trace=trace, pages=pages,
        rows=[row | {"path": path(row)} for row in rows],
        back=view.path("/failures", **query),
    )  # fmt: skip


def path(row: Row) -> str:
    """Return the path of the page of a failure."""
    if row["kind"] == "node job":
        return view.path("/runs/", row["run_id"], node=row["node_id"])
    if row["kind"] == "schedule":
        return view.path("/schedules", name=row["id"])
    return view.path("/jobs/", row["id"])


# --- acts --------------------------------------------------------------------------------------


@router.post("/failures/retry")
async def retry(request: Request) -> Response:
    """Queue the jobs of a group again that its page has named."""
    form = await forms.act(request, "submit", kind="failures")
    assert form.selection is not None
    done = await form.run(jobs.retry_many, form.selection.ids)
    links = [(f"job {each['id']}", view.path("/search", q=each["id"])) for each in done[:20]]
    text = runs_page.summed_up(done, "queued", "queued again")
    return form.done(f"{text}.", back=form.back, links=links)


@router.post("/failures/{verb}")
async def mark(request: Request, verb: Literal["seen", "unseen"]) -> Response:
    """Hide a group until it fails again, or show one that was hidden.

    The form has the id of the group, as its signature may be a secret that the page does not show.
    """
    form = await forms.act(request, "submit", kind="failures seen")
    assert form.selection is not None
    _, (group,), last_at = form.selection
    # Up to its last failure on the page, the group has one of the newest.
    given = {"until": last_at, "newest": failures.MOST, "seen": True}
    found = await view.read(request, _read, given)
    signature = next((each["signature"] for each in found.groups if each["id"] == group), None)
    if signature is None:
        text = "The failures of this group were retried or deleted. Nothing was changed."
        raise forms.Refused(409, text)
    is_seen = verb == "seen"
    shown = await form.run(_mark, signature, last_at if is_seen else None)
    fields = {"selection": form.values["selection"], "back": form.back}
    undo = forms.Action("/failures/unseen", "Undo", "submit", fields) if is_seen else None
    words = "Hidden until it fails again" if is_seen else "Shown again"
    return form.done(f"{words}: {shown}", back=form.back, undo=undo)


def _mark(signature: str, until: datetime | None) -> str:
    """Mark a group as seen, or not; return its signature without secrets."""
    failures.mark_seen(signature, until)
    return display.line(view.redacted(signature), 120)
