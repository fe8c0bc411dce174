"""What a role may do in the database, against what it needs for a purpose."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.admin import permissions

Missing = permissions.MissingRight
PURPOSES = permissions.PURPOSES
"""What each documented role needs, by purpose: rights by table."""


def lacking(conn: db.Connection, purpose: str) -> list[permissions.MissingRight]:
    """Return what the role of `conn` lacks for a purpose."""
    return permissions.lacking(conn, purpose)


def excessive(conn: db.Connection, purpose: str) -> list[permissions.ExcessRight]:
    """Return what the role of `conn` may do and does not need for a purpose."""
    return permissions.excessive(conn, purpose)


def missing(conn: db.Connection) -> list[str]:
    """Return what the role of `conn` lacks to work, as the doctor names it."""
    return [f"{one.right} on {one.name}" for one in permissions.lacking(conn, "work")]


def grants(lacks: list[permissions.MissingRight], role: str) -> list[str]:
    """Return the statements that give a role what it lacks."""
    return permissions.grants(lacks, role)


def revokes(found: list[permissions.ExcessRight]) -> list[str]:
    """Return the statements that take from roles what they do not need."""
    return permissions.revokes(found)
