"""Show the questions that runs ask people, the longest wait first, and take the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import fastapi
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import acts, db, errors, runs
from queue_workflows.dag import answers, payload
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.service.dashboard import forms, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 25
CHOICES: Final = 200
"""Options of a question that its page shows; more are answered as JSON."""
FEW: Final = 12
"""Options up to which the list of questions has the form."""
NEWS: Final = 100
"""Questions that are counted as new ones."""
IMAGES: Final = frozenset({"image"})


@router.get("/inbox")
async def listed(
    request: Request, after: pydantic.AwareDatetime | None = None, seq: int | None = None
) -> Response:
    """Show the questions that wait, the longest wait first."""

    def read(conn: db.Connection) -> list[JsonDict]:
        rows = statements.overview.waiting_inputs(
            conn, run=None, node=None, after=after, after_seq=seq, limit=PAGE + 1
        )
        return [question(row) for row in rows]

    rows = await view.read(request, read)
    last = rows[PAGE - 1] if len(rows) > PAGE else None
    following = last and {"after": last["since"].isoformat(), "seq": last["seq"]}
    return view.page(
        request,
        "inbox.html",
        title="Inbox",
        command="queue-workflows inputs",
        questions=rows[:PAGE],
        few=FEW,
        pages=view.Pager("/inbox", {}, following, after is None),
    )


@router.get("/inbox/news")
async def news(request: Request, at: pydantic.AwareDatetime) -> Response:
    """Return how many questions came after a page was made, up to a hundred."""

    def read(conn: db.Connection) -> JsonDict:
        found: int = statements.pages.new_questions(conn, since=at, most=NEWS)
        count = display.counted(found, "new question") if found else ""
        if found == NEWS:
            count = f"{NEWS}+ new questions"
        return {"count": count, "at": at, "to": "/inbox", "query": {}}

    return await view.fragment(request, "news.html", lambda: view.read(request, read))


@router.get("/inbox/question")
async def one(request: Request, run: view.Text = None, node: view.Text = None) -> Response:
    """Show one question."""
    return _page(request, await view.read(request, _question, run or "", node or ""))


def _page(request: Request, asked: JsonDict, *, wrong: str = "", given: Any = None) -> Response:
    """Return the page of a question, also with an answer that it does not take."""
    return view.page(
        request,
        "inbox_question.html",
        title=f"Question of {display.line(asked['workflow_name'], 120)}",
        command=display.answer_command(asked["run_id"], asked["node_id"]),
        status=422 if wrong else 200,
        each=asked,
        wrong=wrong,
        given=given or {},
    )


def _question(conn: db.Connection, run_id: str, node_id: str) -> JsonDict:
    """Return a question that waits. Raises `NotFound`, which says who was faster."""
    known = payload.is_storable(run_id) and payload.is_storable(node_id)
    rows: list[Row] = []
    if known:
        rows = statements.overview.waiting_inputs(
            conn, run=run_id, node=node_id, after=None, after_seq=None, limit=1
        )
    if not rows or rows[0]["answered"]:
        where = f"node {display.line(node_id, 120)} of run {display.line(run_id, 80)}"
        who = _who_was_faster(conn, run_id, node_id) if known else ""
        raise view.NotFound(f"{where} waits for no answer{who}", near=[("all questions", "/inbox")])
    return question(rows[0])


def _who_was_faster(conn: db.Connection, run_id: str, node_id: str) -> str:
    """Return `: answered by ann 5 s ago`, or nothing if no act says so."""
    now = statements.schedules.now(conn)
    for act in acts.list(action="answer", kind="run", subject=run_id, limit=200, conn=conn):
        if stored_json.mapping(act["detail"]).get("node") == node_id:
            ago = display.duration((now - act["at"]).total_seconds())
            return f": answered by {display.line(act['actor'], 80)} {ago} ago"
    return ""


def question(row: Row) -> JsonDict:
    """Return a question with the form that its widget needs.

    `form`: `one` or `many` of the `choices`, `yes` (or no), `text`, `file` (a choice or a path), or
    `json`. A choice has its `label`, and the `image` below the files of its run, if it is one.
    `asked` changes with the question.
    """
    spec = stored_json.mapping(row["input_spec"])
    choices = answers.options(spec)
    kind = answers.type_of(spec) or str(spec.get("type") or spec.get("widget"))
    if spec.get("widget") in ("file_upload", "pick_or_upload"):
        form = "file"
    elif choices and len(choices) <= CHOICES:
        form = "many" if spec.get("multiple") else "one"
    elif kind in ("boolean", "bool", "checkbox", "confirm", "toggle"):
        form = "yes"
    else:
        form = "text" if kind in ("string", "text", "str", "textarea") else "json"
    return row | {
        "form": form,
        "prompt": stored_json.text(spec.get("prompt")),
        "widget": stored_json.text(spec.get("widget")),
        "choices": [
            {"label": view.redacted(label), "image": _image(value)}
            for label, value in choices[:CHOICES]
        ],
        "asked": hashlib.sha256(display.json_line(row["input_spec"]).encode()).hexdigest()[:16],
        "left_out": max(0, len(choices) - CHOICES),
        "path": f"/inbox/question?{urlencode({'run': row['run_id'], 'node': row['node_id']})}",
        "is_known": row["input_spec"] is not None,
    }


def _image(value: Any) -> str | None:
    record = stored_json.mapping(value)
    return stored_json.text(record.get("rel_path")) if record.get("kind") in IMAGES else None


@router.post("/inbox/answer")
async def answer(request: Request) -> Response:
    """Answer a question. An answer that does not fit is shown again with the reason."""
    form = await forms.act(request, "submit")
    run_id, node_id = form.values.get("run", ""), form.values.get("node", "")
    asked = await _waiting(request, run_id, node_id)
    if form.values.get("asked") != asked["asked"]:
        raise forms.Refused(409, "The question has changed since the page was shown. Nothing was "
                            "changed: open it again.")  # fmt: skip
    try:
        value = _given(asked, form.values)
        await form.run(runs.answer, run_id, node_id, value, check=True)
    except (errors.InputRefused, errors.InvalidPayload) as error:
        # Either the answer does not fit, or somebody was faster, which this says.
        asked = await _waiting(request, run_id, node_id)
        return _page(request, asked, wrong=str(error), given=form.values)
    shown = display.compact(view.redacted(value), 120)
    text = f"Answered: {display.line(node_id, 120)} takes {shown}."
    return form.done(text, back="/inbox", links=[(f"run {run_id}", view.path("/runs/", run_id))])


async def _waiting(request: Request, run_id: str, node_id: str) -> JsonDict:
    """Return a question that waits, or refuse the form and say who was faster."""
    try:
        return await view.read(request, _question, run_id, node_id)
    except view.NotFound as error:
        raise forms.Refused(409, f"{error.text}. Nothing was changed.") from None


def _given(asked: JsonDict, values: Mapping[str, str]) -> Any:
    """Return the answer that a form holds. Raises `InvalidAnswer` for a text that is not JSON."""
    text = values.get("value", "")
    choices = [value for _, value in answers.options(asked["input_spec"])]
    picked = [name.removeprefix("choice-") for name in values if name.startswith("choice-")]
    if asked["form"] == "many":
        return [_picked(choices, place) for place in picked]
    if asked["form"] in ("one", "file") and "choice" in values:
        return _picked(choices, values["choice"])
    if asked["form"] == "file" and not text:
        raise errors.InvalidAnswer("choose a file, or name its path")
    if asked["form"] in ("text", "file"):
        return text
    return answers.meant(asked["input_spec"], _json(values.get("choice", text)))


def _picked(choices: list[Any], place: str) -> Any:
    if not place.isdecimal() or len(place) > 9 or int(place) >= len(choices):
        raise errors.InvalidAnswer(f"{display.line(place, 40)} is none of its options")
    return choices[int(place)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidAnswer(
            f"{display.line(text, 60)} is not JSON ({display.line(error, 120)}): a text needs "
            'quotes, as in "yes"'
        ) from None
