"""Create roles with exactly the rights that `connect --for ...` prints."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
from psycopg import conninfo, sql

from queue_workflows.admin import checks, permissions
from queue_workflows.cli import doctor

WRITES = tuple(purpose for purpose in permissions.PURPOSES if purpose not in ("migrate", "read"))
"""The documented roles that write: `migrate` owns the tables, `read` writes nothing."""
ROUNDS = 6
"""The right to see the schema's version comes first, the others are printed once it is there."""


def as_role(dsn: str, role: str) -> str:
    """Return the DSN of a session with the rights of this role."""
    return conninfo.make_conninfo(dsn, options=f"-c role={role}")


@contextmanager
def role(dsn: str, purpose: str | None) -> Generator[str]:
    """Yield a new role with the GRANTs of `connect --for`; None: without rights."""
    name = f"hostile_{purpose or 'nobody'}_{secrets.token_hex(4)}"
    _as_owner(dsn, sql.SQL("CREATE ROLE {}"), name)
    try:
        if purpose is not None:
            with psycopg.connect(dsn, autocommit=True) as owner:
                _grant(owner, as_role(dsn, name), purpose)
        yield name
    finally:
        _as_owner(dsn, sql.SQL("DROP OWNED BY {}; DROP ROLE {}"), name, name)


def _as_owner(dsn: str, statement: sql.SQL, *names: str) -> None:
    """Execute on a new connection, since the server may have been restarted."""
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(statement.format(*map(sql.Identifier, names)))


def _grant(owner: psycopg.Connection[tuple[object, ...]], dsn: str, purpose: str) -> None:
    """Carry out what `connect` prints until it finds nothing missing."""
    for _ in range(ROUNDS):
        failed = [step for step in doctor.examine(dsn, purpose, 5.0) if step.level == checks.ERROR]
        if not failed:
            return
        statements = failed[0].remedy.split("; ")
        if not all(each.startswith(("GRANT ", "REVOKE ")) for each in statements):
            raise AssertionError(f"connect --for {purpose}: {failed[0]}")
        for each in statements:
            owner.execute(each.encode())
    raise AssertionError(f"connect --for {purpose} asks for more rights each time: {failed[0]}")
