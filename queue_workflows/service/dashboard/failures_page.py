"""Show failures in groups of one cause, retry the jobs of a group, and mark groups as seen."""

from __future__ import annotations

import shlex
from collections import Counter
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import urlencode

import fastapi
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, failures, jobs
from queue_workflows.runtime import clock, display
from queue_workflows.service.dashboard import forms, run_page, session, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 25
"""Groups, and members of a group, on a page."""
VISIT: Final = "queue_workflows_failures"
"""The cookie with the time of the visit before this one, and of the last request."""
VISIT_S: Final = 1800.0
"""A request that comes so much later than the one before begins another visit."""
_FILTERS: Final = ("since", "until", "queue", "workflow", "machine", "text")


class Filter(NamedTuple):
    """The filters of a page, from its query."""

    query: dict[str, str]
    """The filters, and `newest` and `seen` where they are not the defaults."""
    given: dict[str, Any]
    """The arguments of `failures.list`."""
    seen: bool

    def command(self, name: str) -> str:
        """Return the command that shows the same."""
        words = [
            f"--{key} {shlex.quote(value)}" for key, value in self.query.items() if key != "seen"
        ]
        return " ".join(["queue-workflows failures", name, *words, *(["--all"] * self.seen)])


async def _filter(
    request: Request, since: view.Text = None, until: view.Text = None, queue: view.Text = None,
    workflow: view.Text = None, machine: view.Text = None, text: view.Text = None,
    seen: bool = False,
    newest: Annotated[int, fastapi.Query(ge=1, le=failures.MOST)] = failures.NEWEST,
) -> Filter:  # fmt: skip
    values = (since, until, queue, workflow, machine, text)
    named = {name: value for name, value in zip(_FILTERS, values, strict=True) if value}
    if "text" in named:
        run_page.check_values(request)
    given: dict[str, Any] = {"newest": newest} | named
    for name in {"since", "until"} & named.keys():
        given[name] = clock.parse_since(named[name])
    more = {"newest": str(newest)} if newest != failures.NEWEST else {}
    return Filter(named | more | ({"seen": "1"} if seen else {}), given, seen)


Chosen = Annotated[Filter, fastapi.Depends(_filter)]


@router.get("/failures")
async def listed(request: Request, chosen: Chosen, after: view.Text = None) -> Response:
    """Show the groups of the newest failures, the one that failed last first."""

    def read(conn: db.Connection) -> failures.Found:
        return failures.list(seen=chosen.seen, conn=conn, **chosen.given)

    found = await view.read(request, read)
    names = [group["id"] for group in found.groups]
    begin = names.index(after) + 1 if after in names else 0
    groups = found.groups[begin : begin + PAGE]
    before = _last_visit(request, found.now)
    # Of a group whose first failure was perhaps not read it is unknown whether it is new.
    knows = before is not None and (found.is_whole or (found.back_to or found.now) <= before)
    more = {**chosen.query, "after": names[begin + PAGE - 1]} if names[begin + PAGE :] else None
    response = view.page(
        request,
        "failures.html",
        title="Failures",
        command=chosen.command("list"),
        found=found,
        groups=[_shown(request, group, found, chosen) for group in groups],
        new=[group["id"] for group in groups if knows and before and group["first_at"] > before],
        filter=chosen.query,
        most=failures.MOST,
        total=sum(group["count"] for group in found.groups),
        pages=view.Pager("/failures", chosen.query, more, begin == 0),
    )
    _note_visit(request, response, before, found.now)
    return response


@router.get("/failures/news")
async def news(request: Request, chosen: Chosen, at: pydantic.AwareDatetime) -> Response:
    """Return how many jobs that fit have failed since a page was made."""
    given: dict[str, Any] = chosen.given | {"since": at, "newest": 1000}

    def read(conn: db.Connection) -> JsonDict:
        found = failures.list(conn=conn, **given)
        count = sum(group["count"] for group in found.groups if group["last_at"] > at)
        return {"count": display.counted(count, "more failure") if count else "", "at": at}

    async def make() -> JsonDict:
        return await view.read(request, read) | {"to": "/failures", "query": chosen.query}

    return await view.fragment(request, "news.html", make)


@router.get("/failures/{group}")
async def one(
    request: Request, group: str, chosen: Chosen,
    start: Annotated[int, fastapi.Query(ge=0, le=failures.MOST)] = 0,
) -> Response:  # fmt: skip
    """Show the failures of a group, the newest first, and the traceback of the newest."""

    def read(conn: db.Connection) -> tuple[failures.Found, list[Row], str | None]:
        found = failures.list(seen=True, conn=conn, **chosen.given)
        given: dict[str, Any] = {"until": found.now} | chosen.given
        rows = failures.members(group, conn=conn, **given)
        return found, rows, failures.traceback(rows[0], conn=conn) if rows else None

    found, rows, trace = await view.read(request, read)
    own = next((each for each in found.groups if each["id"] == group), None)
    if own is None:
        raise view.NotFound(
            f"no group {display.line(group, 40)} among the newest {found.examined:,} failures: "
            "its jobs were retried or deleted, or they failed earlier",
            near=[("all failures", "/failures")],
        )
    query = chosen.query
    rest = {**query, "start": start + PAGE} if len(rows) > start + PAGE else None
    return view.page(
        request,
        "failure.html",
        title="Failures of one cause",
        command=chosen.command(f"show {group}"),
        group=_shown(request, own, found, chosen),
        rows=[row | {"path": path(row)} for row in rows[start : start + PAGE]],
        trace=trace,
        filter=query,
        found=found,
        pages=view.Pager(f"/failures/{group}", query, rest, not start),
    )


@router.get("/failures/{group}/ids")
async def ids(request: Request, group: str, chosen: Chosen) -> Response:
    """Return the ids of the jobs of a group as a text, one a line."""

    def read(conn: db.Connection) -> list[Row]:
        return failures.members(group, conn=conn, **chosen.given)

    rows = await view.read(request, read)
    text = "".join(f"{row['id']}\n" for row in rows if row["kind"] != "schedule")
    return run_page.download(text, f"failures-{group}.txt")


def path(row: Row) -> str:
    """Return the path of the page of a failure."""
    if row["kind"] == "node job":
        query = urlencode({"node": row["node_id"]})
        return f"{view.path('/runs/', row['run_id'])}?{query}"
    return view.path("/schedules/" if row["kind"] == "schedule" else "/jobs/", row["id"])


def _shown(request: Request, group: JsonDict, found: failures.Found, chosen: Filter) -> JsonDict:
    """Return a group with its actions, and without the text of its error for the scope `look`."""
    signature, count = group["signature"], group["jobs"]
    own = session.of(request)
    if own.sees_values:
        name = str(view.redacted(signature))
    else:
        # An error without a colon may be a value alone.
        kind, colon, _ = signature.partition(":")
        name = kind if colon and kind.isidentifier() else "an error"
    zone = session.zone_of(own.zone) or found.now.tzinfo
    as_of = found.now.astimezone(zone).strftime("%H:%M:%S")
    back = view.here(request)
    begin = found.begin if found.is_whole or found.back_to is None else found.back_to
    limits = {key: chosen.query[key] for key in _FILTERS[2:] if key in chosen.query}
    of_group = {"group": group["id"], "since": begin.isoformat(), **limits}
    newest = group["last"]
    acts: list[forms.Action] = []

    def add(where: str, label: str, of: forms.Selection, kind: Any, text: str = "") -> None:
        fields = {"selection": forms.sign_selection(request, of), "back": back}
        path = f"/failures/{where}"
        acts.append(forms.Action(path, label, "submit", fields, kind, text, of.count))

    if count:
        some = f"the newest {jobs.BATCH} of {count:,} jobs" if count > jobs.BATCH else (
            display.counted(count, "job"))  # fmt: skip
        text = f"Retry {some} of `{name}`, as of {as_of}. Jobs that failed since are not included."
        whole = forms.Selection("failures", (), of_group, found.end, count)
        add("retry", f"Retry {min(count, jobs.BATCH)}", whole, "makes", text)
    if count > 1 and newest["kind"] != "schedule":
        text = f"Retry job {display.line(newest['id'], 80)}, the newest of `{name}`, as a sample."
        sample = forms.Selection("failures", (newest["id"],), {}, found.end, 1)
        add("retry", "Retry 1", sample, "makes", text)
    seen = {"signature": signature, "until": group["last_at"].isoformat()}
    mark = forms.Selection("failures seen", (), seen, None, 1)
    if group["seen_at"] is None:
        add("seen", "Mark as seen", mark, "now")
    else:
        add("unseen", "Show again", mark, "now")
    return group | {"name": name, "actions": acts, "trend": trend(group["bars"])}


def trend(bars: list[int]) -> str:
    """Return the attribute `d` of bars in a field of 4 units each and a height of 20."""
    most = max(bars)
    heights = [max(1, round(20 * count / most)) if count else 0 for count in bars]
    return "".join(f"M{4 * x} 20h3v-{y}h-3z" for x, y in enumerate(heights) if y)


# --- visits ------------------------------------------------------------------------------------


def _last_visit(request: Request, now: datetime) -> datetime | None:
    """Return when the visit before this one ended; None for a first visit."""
    times = request.cookies.get(VISIT, "").split(".")
    try:
        before, last = (datetime.fromtimestamp(int(each), now.tzinfo) for each in times)
    except (ValueError, OverflowError, OSError):
        return None
    return last if (now - last).total_seconds() > VISIT_S else before


def _note_visit(
    request: Request, response: Response, before: datetime | None, now: datetime
) -> None:
    value = f"{int((before or now).timestamp())}.{int(now.timestamp())}"
    attributes = request.app.state.doors.attributes(request)
    response.set_cookie(VISIT, value, max_age=session.LASTS_S, **attributes)


# --- acts --------------------------------------------------------------------------------------


@router.post("/failures/retry")
async def retry(request: Request) -> Response:
    """Queue the jobs of a group again that were on the page, 500 at most."""
    form = await forms.act(request, "submit", kind="failures")
    assert form.selection is not None
    done, left = await form.run(_retry, form.selection)
    outcomes = Counter(each["outcome"] for each in done)
    words = [f"{outcomes.pop('queued', 0):,} queued again"]
    words += [f"{count:,} {outcome}" for outcome, count in outcomes.items()]
    not_queued = [each for each in done if each["outcome"] != "queued"]
    reasons = "; ".join(dict.fromkeys(str(each["reason"]) for each in not_queued[:5]))
    text = ", ".join(words) + (f": {reasons}" if reasons else "")
    text += f". {left:,} are left: retry once more." if left else "."
    links = [(f"job {each['id']}", f"/search?{urlencode({'q': each['id']})}") for each in done[:20]]
    return form.done(text, back=form.back, links=links)


def _retry(chosen: forms.Selection) -> tuple[list[JsonDict], int]:
    """Retry the selected jobs; return their outcomes, and how many jobs are left for another call.

    Raises `Refused` if there are more than were on the page, as jobs that failed before it was read
    can become visible later.
    """
    ids = [*chosen.ids]
    if not ids:
        given = dict(chosen.filter)
        since = datetime.fromisoformat(given.pop("since"))
        rows = failures.members(
            given.pop("group"), since=since, until=chosen.at, newest=failures.MOST, **given
        )
        ids = [row["id"] for row in rows if row["kind"] != "schedule"]
    if len(ids) > chosen.count:
        raise forms.Refused(409, "More jobs failed than the page showed. Nothing was changed: go "
                            "back, and reload the page.")  # fmt: skip
    return jobs.retry_many(ids[: jobs.BATCH]), max(0, len(ids) - jobs.BATCH)


@router.post("/failures/seen")
async def seen(request: Request) -> Response:
    """Hide a group until it fails again."""
    form, signature, until = await _marked(request)
    await form.run(failures.mark_seen, signature, until)
    fields = {"selection": form.values["selection"], "back": form.back}
    again = forms.Action("/failures/unseen", "Undo", "submit", fields)
    text = f"Hidden until it fails again: {display.line(view.redacted(signature), 120)}"
    return form.done(text, back=form.back, undo=again)


@router.post("/failures/unseen")
async def unseen(request: Request) -> Response:
    """Show a group again that was marked as seen."""
    form, signature, _ = await _marked(request)
    await form.run(failures.unmark_seen, signature)
    text = f"Shown again: {display.line(view.redacted(signature), 120)}"
    return form.done(text, back=form.back)


async def _marked(request: Request) -> tuple[forms.Form, str, datetime]:
    """Return a form with the group that it is about, and until when it was seen."""
    form = await forms.act(request, "submit", kind="failures seen")
    assert form.selection is not None
    chosen = form.selection.filter
    return form, chosen["signature"], datetime.fromisoformat(chosen["until"])
