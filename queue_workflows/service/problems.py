"""Turn errors of the library and of requests into problem documents (RFC 9457)."""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from queue_workflows import db, errors
from queue_workflows.runtime import display

MEDIA_TYPE: Final = "application/problem+json"
DETAIL_CHARACTERS: Final = 2000
RETRY_AFTER_S: Final = 2
_KEPT: Final = ("connection", "retry-after")
"""Headers of a problem document that its page has, too."""
_log = logging.getLogger("queue_workflows.service")

STATUSES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (errors.UnknownJob, 404),
    (errors.UnknownSchedule, 404),
    (errors.UnknownWorker, 404),
    (errors.UnknownModel, 404),
    (errors.IdempotencyClash, 409),
    (errors.InvalidAnswer, 422),
    (errors.InputRefused, 409),
    (errors.DatabaseUnavailable, 503),
    (errors.DatabaseUrlMissing, 503),
    (errors.SchemaTimeout, 503),
    (errors.SchemaTooNew, 503),
    (errors.EmbeddedUnavailable, 503),
    (errors.DatabaseRefused, 403),
)
"""The status of an error, by the first class that it is one of; any other is refused with 422."""
_DENIED = "42501"
_NO_SCHEMA: Final = frozenset({"42P01", "42703", "42883"})
"""A table, a column or a function is missing."""
_AWAY: Final = frozenset({"08", "25", "28", "3D", "40", "53", "55", "57", "58", "XX"})
"""Classes of SQLSTATE that the state of the database causes; requests cause all others."""
TITLES: Final[Mapping[int, str]] = {
    400: "The request cannot be read",
    401: "A bearer token is needed",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "The request took too long to arrive",
    409: "Conflict",
    410: "Too much was missed",
    413: "The body is too large",
    414: "The URL is too long",
    415: "The body must be JSON",
    421: "Wrong host",
    422: "The request was refused",
    428: "A precondition is needed",
    431: "The headers are too large",
    500: "Internal error",
    503: "Not available now",
}


def problem(
    status: int,
    detail: str,
    *,
    kind: str = "",
    headers: Mapping[str, str] | None = None,
    **members: Any,
) -> Response:
    """Return a problem document; `kind` is the class of the error, `members` are added to it."""
    slug = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind).lower()
    content = {
        "type": f"urn:queue-workflows:{slug}" if kind else "about:blank",
        "title": TITLES.get(status, "The request was refused"),
        "status": status,
        "detail": display.line(detail, DETAIL_CHARACTERS),
        **members,
    }
    chosen = dict(headers or {})
    if status == 503:
        chosen.setdefault("retry-after", str(RETRY_AFTER_S))
    return Response(display.strict_json(content), status, chosen, MEDIA_TYPE)


def page(refused: Response, home: str) -> Response:
    """Return a problem document as a page for people, with a link to the address `home`."""
    detail = html.escape(json.loads(bytes(refused.body))["detail"])
    text = (
        f'<!doctype html><html lang="en"><title>Not done</title><h1>Not done</h1><p>{detail}</p>'
        f'<p><a href="{html.escape(home)}">Go to Now</a></p></html>'
    )
    kept = {name: refused.headers[name] for name in _KEPT if name in refused.headers}
    return Response(text, refused.status_code, kept, "text/html; charset=utf-8")


def of_error(error: Exception) -> Response:
    """Return the problem document of an error of the library or of the database."""
    status, detail, kind = described(error)
    return problem(status, detail, kind=kind)


def described(error: Exception) -> tuple[int, str, str]:
    """Return the status, a sentence and the kind of an error; log it unless a request caused it."""
    if isinstance(error, errors.QueueWorkflowsError):
        status = next((code for kind, code in STATUSES if isinstance(error, kind)), 422)
        return status, str(error), type(error).__name__
    state = getattr(error, "sqlstate", None) or ""
    if state == _DENIED:
        text = (
            "the service's database user lacks a right; `queue-workflows connect --for work --sql` "
            "(with `--for read` for a read-only service) prints the GRANTs that it needs"
        )
        return 403, text, "DatabaseRefused"
    away = isinstance(error, (db.OperationalError, db.InterfaceError, TimeoutError))
    if state in _NO_SCHEMA or (state[:2] in _AWAY if state else away):
        _log.warning("a request failed, the database is not available: %s", error)
        text = "the database does not answer; try again"
        if state in _NO_SCHEMA:
            text = "the database has no schema of this version; `queue-workflows migrate` makes it"
        return 503, text, "DatabaseUnavailable"
    if isinstance(error, db.Error):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return 422, f"the database refused it: {lines[0]}", "RowRefused"
    _log.error("a request failed", exc_info=error)
    return 500, "the service failed; its log has the reason", "InternalError"
