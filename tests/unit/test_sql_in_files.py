"""The package's SQL is in `queue_workflows/sql/` and in migrations, and not in Python strings."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import queue_workflows

PACKAGE = Path(queue_workflows.__path__[0])
_IS_SQL = re.compile(
    r"\s*(?:"
    r"(?:SELECT|WITH|VALUES|COPY|CALL|EXPLAIN|PREPARE|EXECUTE|SHOW|RESET|DISCARD|VACUUM|ANALYZE"
    r"|LISTEN|UNLISTEN|NOTIFY|TRUNCATE|REINDEX|CLUSTER|GRANT|REVOKE|SAVEPOINT|DO)\s+\S"
    r"|(?:INSERT|MERGE)\s+INTO\s|DELETE\s+FROM\s|UPDATE\s+\S+\s|LOCK\s+TABLE\s|COMMENT\s+ON\s"
    r"|(?:CREATE|ALTER|DROP)\s+[A-Z]{2}|SET\s+\w|(?:BEGIN|COMMIT|ROLLBACK)\s*(?:;|$)"
    r"|(?:WHERE|FROM|JOIN|RETURNING|UNION|HAVING|LIMIT|ORDER\s+BY|GROUP\s+BY|ON\s+CONFLICT)\s"
    r")"
)
"""The start of a statement, or of a clause that code would append to one. SQL is in capitals."""
ALLOWED = {
    "admin/permissions.py": (3, "GRANT and REVOKE statements that `connect` prints for people"),
    "cli/migrate.py": (2, "BEGIN and COMMIT around the printed migrations"),
    "admin/checks.py": (4, "remedies for people"),
    "cli/doctor.py": (1, "a remedy for people"),
    "db/__init__.py": (3, "names of `scripts` in __all__"),
    "db/databases.py": (2, "CREATE and COMMENT ON DATABASE take identifiers, not parameters"),
    "db/functions.py": (2, "LOCK TABLE takes identifiers; the triggers' text has the tables"),
    "db/ledger.py": (5, "an app names the ledger of its own chain"),
    "db/link.py": (3, "it drives libpq itself: ROLLBACK, SAVEPOINT, SET client_encoding"),
    "db/schema.py": (3, "LOCK and count in any table of an app, named by the catalog"),
    "db/scratch_databases.py": (5, "CREATE, DROP, TRUNCATE and a check of every table of an app"),
    "db/scripts.py": (3, "BEGIN, COMMIT and ROLLBACK of scripts, compared by identity"),
    "sql/__init__.py": (1, "joins a part that is written for each job table"),
    "embedded/cluster.py": (1, "the single-user server reads it from standard input"),
}
"""Strings that are SQL: how many a file has, and why they cannot be named statements."""


def found(source: str) -> list[tuple[int, str]]:
    """Return line and text of each string of a module that is SQL; docstrings do not count."""
    nodes = [*ast.walk(ast.parse(source))]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            texts.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(value, str):
                texts.append((node.lineno, value))
    return sorted((line, text) for line, text in texts if _IS_SQL.match(text))


def test_python_holds_no_sql_but_what_is_allowed() -> None:
    there = {
        path.relative_to(PACKAGE).as_posix(): found(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    counts = {name: len(texts) for name, texts in there.items() if texts}
    allowed = {name: count for name, (count, _) in ALLOWED.items()}
    differing = {
        name: there[name] for name in counts | allowed if counts.get(name) != allowed.get(name)
    }
    assert not differing, "move new SQL to sql/queries/; lower a count that became smaller"
    assert all(reason for _, reason in ALLOWED.values())


def test_the_search_finds_sql_in_every_kind_of_string() -> None:
    source = '''
"""SELECT is a word of this docstring."""
A = "SELECT 1"
B = b"""
  INSERT INTO runs VALUES (1)"""
C = f"DELETE FROM {A}"
D = ("UPDATE runs"
     " SET status = 'x'")
E = A + " WHERE id = %s"
F = ["SELECT", "select a queue", "Update the runs", f"{A} is set", "BEGIN"]
def f():
    "CREATE TABLE in a docstring"
    execute(sql.SQL("LOCK TABLE {}"))
'''
    assert Counter(line for line, _ in found(source)) == Counter([3, 4, 6, 7, 9, 10, 13])
