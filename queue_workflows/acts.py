"""Record changes that people request, with their author, and list them.

A function that changes something on request takes `by` and `reason`. It records the act in its own
transaction, unless it raises an error or finds that it has no change to make.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
from collections.abc import Generator
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.runtime import clock
from queue_workflows.types import JsonDict, Rows

Via = Literal["sql", "python", "cli", "http"]
"""The origin of an act, which is a plain INSERT, a call, a command or a request over HTTP."""
MOST_ACTOR: Final = 200
"""The most characters of an actor; the history of jobs has the same bound."""
MOST_REASON: Final = 1000


class _Acting(NamedTuple):
    via: Via = "python"
    actor: str | None = None
    reason: str | None = None


_CALL: Final = _Acting()
_acting: Final = contextvars.ContextVar("queue_workflows_acting", default=_CALL)


@contextlib.contextmanager
def acting(
    by: str | None = None, *, reason: str | None = None, via: Via | None = None
) -> Generator[None]:
    """Set the default actor and reason for calls in the block.

    It applies to the present thread or task. A None keeps the value from outside. Raises
    `InvalidConfig` (a ValueError) for a text that cannot be stored or is too long.
    """
    own = _acting.get()
    who, why = _text("by", by, MOST_ACTOR), _text("reason", reason, MOST_REASON)
    token = _acting.set(_Acting(via or own.via, who or own.actor, why or own.reason))
    try:
        yield
    finally:
        _acting.reset(token)


def actor(by: str | None = None) -> str | None:
    """Return who acts: `by`, else the actor of `acting`, else for a command its user's login.

    Returns None without any of these; then the database stores its role. Raises as `acting` does.
    """
    own = _acting.get()
    return _text("by", by, MOST_ACTOR) or own.actor or (_login() if own.via == "cli" else None)


def _text(name: str, given: Any, most: int) -> str | None:
    if given is None or given == "":
        return None
    if not isinstance(given, str) or len(given) > most or not payload.is_storable(given):
        raise errors.InvalidConfig(
            f"{name} {given!r:.40}: it must be a text of at most {most:,} characters, without NUL "
            "or lone surrogates"
        )
    # Secrets are masked, which may make it longer.
    return payload.error_text(given)[:most]


def _login() -> str:
    """Return the login and machine of the user who runs the command, as `ann@db-1`."""
    import getpass  # late: only commands need them
    import socket

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "somebody"  # a container's number without a name
    return payload.error_text(f"{name}@{socket.gethostname()}")[:MOST_ACTOR]


class Act(NamedTuple):
    """An act that is being recorded."""

    actor: str | None
    reason: str | None
    subjects: builtins.list[tuple[str, str]]
    """Kind and id of each object, which gets a row each; if empty, the act is not recorded."""
    detail: JsonDict


@contextlib.contextmanager
def recorded(
    conn: db.Connection,
    action: str,
    *subjects: tuple[str, str],
    by: str | None = None,
    reason: str | None = None,
    **detail: Any,
) -> Generator[Act]:
    """Run the block as this actor, and record the act in the transaction of `conn`.

    The history of jobs names the same actor. The act is not recorded if the block raises, or leaves
    no subjects. On a connection in autocommit mode the block is a transaction, else a savepoint.
    """
    own = _acting.get()
    why = _text("reason", reason, MOST_REASON) or own.reason
    act = Act(actor(by), why, [*subjects], detail)
    # If need be, this statement begins the app's transaction. Otherwise the block below would begin
    # and commit one.
    before = statements.acts.named_actor(conn)
    with conn.transaction():
        if act.actor is not None:
            statements.acts.name_actor(conn, actor=act.actor)
        yield act
        if act.subjects:
            kinds, ids = zip(*act.subjects, strict=True)
            known = {name: value for name, value in act.detail.items() if value is not None}
            statements.acts.add(
                conn,
                via=own.via,
                action=action,
                kinds=[*kinds],
                subjects=[*ids],
                reason=act.reason,
                detail=payload.encode(known, "detail"),
            )
        if act.actor is not None:
            statements.acts.name_actor(conn, actor=before or "")


def list(  # noqa: A001  the verb that users look for
    *,
    since: datetime | timedelta | None = None,
    actor: str | None = None,
    action: str | None = None,
    kind: str | None = None,
    subject: str | None = None,
    before: int | None = None,
    limit: int = 100,
    conn: db.Connection | None = None,
) -> Rows:
    """Return acts, the newest first: `id`, `at`, `actor`, `login`, `via`, `action`, `kind`,
    `subject`, `reason`, `detail`.

    `since` is a time, or a span up to now. `login` is the database role. `before` is the `id` of
    the last act of the previous page. Raises `InvalidConfig` (a ValueError) for a `since` without a
    time zone.
    """
    clock.check_since(since)
    texts = {"actor": actor, "action": action, "kind": kind, "subject": subject}
    if not all(map(payload.is_storable, texts.values())):
        return []
    with db.transaction(conn) as own:
        return statements.acts.find(
            own,
            at=since if isinstance(since, datetime) else None,
            ago=since if isinstance(since, timedelta) else None,
            before=before,
            limit=limit,
            **texts,
        )
