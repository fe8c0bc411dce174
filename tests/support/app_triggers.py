"""An app's own trigger that refuses changes of some rows, or delays them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from queue_workflows import db


def refuse(
    conn: db.Connection, table: str, when: str, *, event: str = "UPDATE", state: str = "P0001"
) -> None:
    """Let a trigger raise for each row of which `when` holds, an expression of OLD and NEW."""
    conn.execute(
        "CREATE FUNCTION app_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {when} THEN RAISE EXCEPTION 'the app refuses %', coalesce(OLD.id, NEW.id)"
        f" USING ERRCODE = '{state}'; END IF; RETURN coalesce(NEW, OLD); END $$;"
        f" CREATE TRIGGER a_app_refuses BEFORE {event} ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION app_refuses()".encode()
    )


@contextmanager
def doing(
    conn: db.Connection, table: str, when: str, statement: str, event: str = "UPDATE"
) -> Generator[None]:
    """Let changes of rows of which `when` holds execute a statement, until the end of the block."""
    conn.execute(
        "CREATE FUNCTION app_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {when} THEN {statement}; END IF; RETURN NEW; END $$;"
        f" CREATE TRIGGER a_app_refuses BEFORE {event} ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION app_refuses()".encode()
    )
    try:
        yield
    finally:
        accept(conn)


def slow(
    conn: db.Connection, table: str, when: str, seconds: float
) -> AbstractContextManager[None]:
    """Let updates of rows of which `when` holds take so long each, until the end of the block."""
    return doing(conn, table, when, f"PERFORM pg_sleep({seconds})")


def accept(conn: db.Connection) -> None:
    """Remove the trigger, if there is one."""
    conn.execute("DROP FUNCTION IF EXISTS app_refuses() CASCADE")


@contextmanager
def refusing(conn: db.Connection, table: str, when: str, state: str = "P0001") -> Generator[None]:
    """Let the trigger refuse updates until the end of the block."""
    refuse(conn, table, when, state=state)
    try:
        yield
    finally:
        accept(conn)
