"""List the acts of people by filters."""

from __future__ import annotations

from typing import Annotated, Any, Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import acts, db
from queue_workflows.runtime import clock
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.types import Rows

router = fastapi.APIRouter()
KINDS: Final = ("run", "job", "queue", "schedule", "machine")
"""The kinds of subjects with a page. Another subject may be a value, as the text of an error."""


@router.get("/acts")
async def listed(
    request: Request, since: view.Text = None, actor: view.Text = None, action: view.Text = None,
    kind: view.Text = None, subject: view.Text = None,
    before: Annotated[int | None, fastapi.Query(ge=0, lt=2**63)] = None,
) -> Response:  # fmt: skip
    """Show a page of acts, the newest first."""
    texts = {"since": since, "actor": actor, "action": action, "kind": kind, "subject": subject}
    query = {name: text.strip() for name, text in texts.items() if text and text.strip()}
    guesses = "actor" in query or ("subject" in query and query.get("kind") not in KINDS)
    if guesses and not session.of(request).sees_values:
        text = "Your session has scope look: it sees no actors, and an id or a name needs its kind."
        raise forms.Refused(403, text)
    given: dict[str, Any] = {**query, "before": before, "limit": view.PAGE + 1}
    if "since" in query:
        given["since"] = clock.parse_since(query["since"])

    def read(conn: db.Connection) -> Rows:
        return acts.list(conn=conn, **given)

    rows = await view.read(request, read)
    more = {**query, "before": rows[view.PAGE - 1]["id"]} if len(rows) > view.PAGE else None
    return view.Page(
        request, "acts.html", title="Acts", command=view.command("queue-workflows acts", query),
        acts=rows[:view.PAGE], filters=query, kinds=KINDS,
        pages=view.Pager("/acts", query, more, before is None),
    )  # fmt: skip
