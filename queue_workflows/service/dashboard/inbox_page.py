"""Show the questions that runs ask people, the longest wait first, and take the answers."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import fastapi
import pydantic
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import acts, db, errors, runs
from queue_workflows.dag import answers, confinement
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 25
LISTED_BYTES: Final = 16 * 1024
MOST_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a question up to which the list reads it, and its page."""
CHOICES: Final = 200
"""Options of a question that its page shows; more are answered as JSON."""
FEW: Final = 12
"""Options up to which the list of questions has the form."""
NEWS: Final = 100
"""Questions that are counted as new ones."""
NAME_BYTES: Final = 200
"""Longest name of an uploaded file."""
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@router.get("/inbox")
async def listed(
    request: Request, after: pydantic.AwareDatetime | None = None, seq: int | None = None
) -> Response:
    """Show the questions that wait, the longest wait first."""

    def read(conn: db.Connection) -> list[JsonDict]:
        rows = statements.pages.questions(
            conn, run=None, node=None, after=after, after_seq=seq, most=LISTED_BYTES, limit=PAGE + 1
        )
        return [*map(_question, rows)]

    found = await view.read(request, read)
    last = found[PAGE - 1] if len(found) > PAGE else None
    following = last and {"after": last["since"].isoformat(), "seq": last["seq"]}
    return view.Page(
        request, "inbox.html", title="Inbox", command="queue-workflows inputs", few=FEW,
        questions=found[:PAGE], pages=view.Pager("/inbox", {}, following, after is None),
    )  # fmt: skip


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
    sees = session.of(request).sees_values
    return _page(request, await view.read(request, _asked, run or "", node or "", sees))


def _page(request: Request, asked: JsonDict, *, wrong: str = "", given: Any = None) -> Response:
    """Return the page of a question, also with an answer that it does not take."""
    return view.Page(
        request, "inbox_question.html", status=422 if wrong else 200, each=asked, wrong=wrong,
        title=f"Question of {display.line(asked['workflow_name'], 120)}", given=given or {},
        command=display.answer_command(asked["run_id"], asked["node_id"]),
    )  # fmt: skip


def _asked(conn: db.Connection, run_id: str, node_id: str, sees: bool) -> JsonDict:
    """Return a question that waits. Raises `NotFound`, perhaps with who answered first."""
    where = f"node {display.line(node_id, 120)} of run {display.line(run_id, 80)}"
    text = f"{where} does not wait for an answer"
    rows = statements.pages.questions(
        conn, run=run_id, node=node_id, after=None, after_seq=None, most=MOST_BYTES, limit=1
    )
    if rows and not rows[0]["answered"]:
        return _question(rows[0])
    now = statements.schedules.now(conn)
    for act in acts.list(action="answer", kind="run", subject=run_id, limit=200, conn=conn):
        if stored_json.mapping(act["detail"]).get("node") == node_id:
            ago = display.duration((now - act["at"]).total_seconds())
            by = f" by {display.line(act['actor'], 80)}" if sees else ""
            text += f": answered{by} {ago} ago"
            break
    raise view.NotFound(text, near=[("all questions", "/inbox")])


def _question(row: Row) -> JsonDict:
    """Return a question with the form that its widget needs.

    `form`: `one` or `many` of the `choices`, `yes` (or no), `text`, `file` (a choice, an upload or
    a path), or `json`. A choice has its `label`, and the `image` below the files of its run, if it
    is one.
    """
    spec = stored_json.mapping(row["input_spec"])
    choices, widget = answers.options(spec), stored_json.text(spec.get("widget"))
    kind = answers.type_of(spec) or str(spec.get("type") or widget)
    if widget in ("file_upload", "pick_or_upload"):
        form = "file"
    elif choices and len(choices) <= CHOICES:
        form = "many" if spec.get("multiple") else "one"
    elif kind in ("boolean", "bool", "checkbox", "confirm", "toggle"):
        form = "yes"
    else:
        form = "text" if kind in ("string", "text", "str", "textarea") else "json"
    unnamed = "a question without a text" if spec else "a question that is not shown here"
    return row | {
        "form": form,
        "title": stored_json.text(spec.get("prompt")) or widget or unnamed,
        "choices": [{"label": label, "image": _image(value)} for label, value in choices[:CHOICES]],
        "left_out": max(0, len(choices) - CHOICES),
        "path": view.path("/inbox/question", run=row["run_id"], node=row["node_id"]),
    }


def _image(value: Any) -> str | None:
    record = stored_json.mapping(value)
    return stored_json.text(record.get("rel_path")) if record.get("kind") == "image" else None


# --- answers -----------------------------------------------------------------------------------


@router.post("/inbox/answer")
async def answer(request: Request) -> Response:
    """Answer a question. An answer that does not fit is shown again with the reason."""
    form = await forms.act(request, "submit", max_files=1)
    run_id, node_id = form.values.get("run", ""), form.values.get("node", "")
    asked = await _waiting(request, run_id, node_id)
    if form.values.get("asked") != (asked["asked"] or ""):
        raise forms.Refused(409, "The question has changed since the page was shown. Nothing was "
                            "changed: open it again.")  # fmt: skip

    def submit() -> str:
        saved = _saved(asked, form.file) if form.file is not None else None
        try:
            value = os.fspath(saved) if saved is not None else _given(asked, form.values)
            runs.answer(run_id, node_id, value, check=True)
        except errors.QueueWorkflowsError:  # after a lost connection, the answer may name the file
            if saved is not None:
                saved.unlink(missing_ok=True)
            raise
        return display.compact(view.redacted(value), 120)

    try:
        shown = await form.run(submit)
    except (errors.InputRefused, errors.InvalidPayload) as error:
        # Either the answer does not fit, or somebody was faster, which this says.
        asked = await _waiting(request, run_id, node_id)
        return _page(request, asked, wrong=str(error), given=form.values)
    text = f"Answered: {display.line(node_id, 120)} takes {shown}."
    return form.done(text, back="/inbox", links=[(f"run {run_id}", view.path("/runs/", run_id))])


async def _waiting(request: Request, run_id: str, node_id: str) -> JsonDict:
    """Return a question that waits, or refuse the form and name who answered first."""
    try:
        return await view.read(request, _asked, run_id, node_id, sees=True)
    except view.NotFound as error:
        raise forms.Refused(409, f"{error.text}. Nothing was changed.") from None


def _given(asked: JsonDict, values: Mapping[str, str]) -> Any:
    """Return the answer that a form holds. Raises `InvalidAnswer` for a text that is not JSON."""
    text = values.get("value", "")
    choices = [value for _, value in answers.options(asked["input_spec"])]
    picked = [name.removeprefix("choice-") for name in values if name.startswith("choice-")]
    if asked["form"] == "many":
        return [_picked(choices, place) for place in picked]
    # A button of the library stays chosen when somebody types another path instead.
    is_typed = asked["form"] == "file" and text != ""
    if asked["form"] in ("one", "file") and "choice" in values and not is_typed:
        return _picked(choices, values["choice"])
    if asked["form"] == "file" and not text:
        raise errors.InvalidAnswer("choose a file, or name its path")
    if asked["form"] in ("text", "file"):
        return text
    typed = values.get("choice", text)
    try:
        return answers.meant(asked["input_spec"], json.loads(typed))
    except (ValueError, RecursionError) as error:
        raise errors.InvalidAnswer(
            f"{display.line(typed, 60)} is not JSON ({display.line(error, 120)}): a text needs "
            'quotes, as in "yes"'
        ) from None


def _picked(choices: list[Any], place: str) -> Any:
    if not place.isdecimal() or len(place) > 9 or int(place) >= len(choices):
        raise errors.InvalidAnswer(f"the question has no option {display.line(place, 40)}")
    return choices[int(place)]


def _saved(asked: JsonDict, upload: UploadFile) -> Path:
    """Store an uploaded file in a new folder below the run's folder, and return its path.

    Raises `InvalidAnswer` if the question does not take it, or it cannot be stored, and
    `FolderRefused` as `confinement.root_of` does.
    """
    name = Path((upload.filename or "").replace("\\", "/")).name
    if not name.isprintable() or name in ("", "..") or len(name.encode()) > NAME_BYTES:
        raise errors.InvalidAnswer("this name of a file cannot be used: rename it")
    if asked["form"] != "file":
        raise errors.InvalidAnswer("the question takes no file: answer it in the form")
    answers.check(asked["input_spec"], name, "the question")
    given = confinement.given({"id": asked["run_id"], "out_dir": asked["out_dir"]})
    root, below = confinement.root_of(given["out_dir"])
    names = (*below, "uploads", secrets.token_hex(8))
    try:
        # No step follows a link, which a node may have put in the place of a folder.
        with confinement.opened(root, *names, create=True) as folder:
            fd = os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    shutil.copyfileobj(upload.file, file)
            except OSError:
                os.unlink(name, dir_fd=folder)  # the part of it that there was room for
                raise
    except OSError as error:
        raise errors.InvalidAnswer(f"the file cannot be stored: {error.strerror}") from None
    return Path(root, *names, name)
