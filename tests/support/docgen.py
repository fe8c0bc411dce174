"""The pages that are made from the code: `python -m tests.support.docgen` writes them anew."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from queue_workflows import config, tasks
from queue_workflows.embedded import cluster
from queue_workflows.testing import servers
from tests.support import catalog

ROOT = Path(__file__).resolve().parents[2]
MADE = (
    "<!-- Made by `python -m tests.support.docgen`; a test compares. Change the code, then make it"
    " anew. -->"
)

MADE_SQL = (
    "-- Made by `python -m tests.support.docgen`; a test compares. Change queue_workflows/sql/ or a"
    "\n-- migration, then make it anew."
)
_VARYING = re.compile(r"--|SET |SELECT pg_catalog|\\|CREATE SCHEMA|COMMENT ON SCHEMA")

ARGUMENTS = {
    "db_url_env": "the variable that holds the DSN; once named, no other is looked at",
    "video_model_ids": "models whose nodes get the short gpu budget (1800 s)",
    "node_module_package": "`node_module` is imported as `<package>.<node_module>`",
    "host_label_env": "the variable that holds the label of this host's workers",
    "host_priority_env": "the variable of this host's claim direction; below 0: newest first",
    "container_prefix": "how the names of containers start that count as ours",
    "ingest_queues": "the queues of ingest jobs; `cpu` and `gpu` belong to nodes",
    "ingest_default_budget_s": "budget of ingest queues other than `fetch` and `load`, s",
    "embedded": "whether the embedded server may be used when no DSN is set",
}
VARIABLES = (
    ("the DSN", config.db_url_variables),
    ("the host app, where `--app` names none", lambda: ("QUEUE_WORKFLOWS_APP",)),
    (
        "the label of this host's workers; default: the host name",
        lambda: ("QUEUE_WORKFLOWS_HOST_LABEL", config.EngineConfig().host_label_env),
    ),
    (
        "this host's claim direction, a whole number; default: 0",
        lambda: ("QUEUE_WORKFLOWS_GPU_CONSUMER_PRIORITY", config.EngineConfig().host_priority_env),
    ),
    (
        "the server for a host's tests (`queue_workflows.testing`), by a database named `*_test`",
        lambda: (servers.VARIABLE,),
    ),
)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|") if text else " "


def _code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def _arguments() -> list[tuple[str, ...]]:
    fresh = config.EngineConfig()
    rows: list[tuple[str, ...]] = []
    for name in inspect.signature(config.configure).parameters:
        value: Any = getattr(fresh, name)
        if isinstance(value, frozenset):
            value = "{" + ", ".join(sorted(map(repr, value))) + "}" if value else "none"
        rows.append((_code(name), _code(value), ARGUMENTS[name]))
    return rows


_MARKS = {inspect.Parameter.KEYWORD_ONLY: "*, ", inspect.Parameter.VAR_KEYWORD: "**"}


def _hooks() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    # The host's door to it checks the policy, which config cannot.
    hooks = {**vars(config), "register_ingest_task": tasks.register_ingest_task}
    for name, function in hooks.items():
        if name.startswith(("set_", "register_")) and inspect.isfunction(function):
            parameters = ", ".join(
                f"{_MARKS.get(p.kind, '')}{p.name}"
                for p in inspect.signature(function).parameters.values()
            )
            text = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
            rows.append((_code(f"{name}({parameters})"), text))
    return rows


def _knob(knob: Mapping[str, str]) -> tuple[str, ...]:
    flag = knob["type"] == "bool"
    default = "off" if flag else knob["default"]
    unit = "" if flag else knob["unit"]
    first, second = knob["variables"].split(", ")
    return (_code(first), _code(second), _code(default), unit, knob["meaning"])


def configuration() -> str:
    """`docs/configuration.md` out of `config`."""
    named = [(", ".join(map(_code, names())), what) for what, names in VARIABLES]
    knobs = [_knob(knob) for knob in config.describe_knobs()]
    return f"""{MADE}

# Configuration

What a host passes to `queue_workflows.configure()`, which hooks it sets, and which environment
variables each process reads. All of it is read when it is used: import order does not matter.

## `configure()`

Keyword arguments only. It changes what is passed, keeps the rest, and may be called again.

{_table(("argument", "default", "meaning"), _arguments())}

## Hooks

Functions of `queue_workflows`, called by the host app before anything starts.

{_table(("function", "meaning"), _hooks())}

## Names in the environment

The first variable that is set and not empty counts.

{_table(("variables", "what it holds"), named)}

`configure(db_url_env=...)` replaces both variables of the DSN by the one it names.

## Knobs

A knob is looked up under its first name, then under its second, then its default is taken. A value
that does not parse gives the default and one warning that names the variable. A flag is on when its
variable is set and not empty.

{_table(("variable", "else", "default", "unit", "meaning"), knobs)}
"""


def _names(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _columns(table: catalog.Table) -> str:
    rows = [
        (_code(c.name), c.type, "" if c.nullable else "not null", _code(c.default))
        for c in table.columns
    ]
    return _table(("column", "type", "", "default"), rows)


def _one_table(table: catalog.Table) -> str:
    parts = [f"### `{table.name}`", table.purpose, _columns(table)]
    for title, items in (
        ("Constraints", table.constraints),
        ("Indexes", table.indexes),
        ("Triggers", table.triggers),
    ):
        if items:
            parts.append(f"{title}:\n\n{_names([_code(item) for item in items])}")
    return "\n\n".join(parts)


def schema(found: catalog.Catalog) -> str:
    """`docs/schema.md` out of a bootstrapped database's catalog."""
    channels = [(_code(name), ", ".join(map(_code, by))) for name, by in found.channels.items()]
    return f"""{MADE}

# Schema

The database at version {found.version}, as its own catalog describes it. Hosts read and write these
tables by plain SQL ([host guide](app-guide.md)). Tables come from the migrations in
`queue_workflows/migrations/`, of which the ledger `queue_schema_version` lists the applied ones.
Functions and triggers come from `queue_workflows/sql/`; `queue_schema_objects` says whose are
installed. The same as one file of SQL: [schema.sql](schema.sql).

## Tables

{(chr(10) * 2).join(_one_table(table) for table in found.tables)}

## Domains

{_names([_code(item) for item in found.domains])}

## Channels

Every notification is sent by a trigger, inside the transaction of whoever wrote the row; only
`hw_metrics` is sent by a function.

{_table(("channel", "sent by"), channels)}

## Functions

{_names([_code(item) for item in found.functions])}
"""


def dump(dsn: str) -> str:
    """Return `docs/schema.sql`: the database as pg_dump prints it, by the newest one that is there.

    Left out is what depends on the server's version and on its roles: settings, owners, comments
    of pg_dump itself, and how a view's columns are qualified.
    """
    done = subprocess.run(
        [str(_pg_dump()), "--schema-only", "--no-owner", "--dbname", dsn],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    kept = [line for line in lines if not _VARYING.match(line)]
    text = re.sub(r"\n{2,}", "\n\n", "\n".join(kept)).strip()
    text = re.sub(r"CREATE VIEW [^;]+;", lambda view: _view(view[0]), text)
    return f"{MADE_SQL}\n\n{text}\n"


def _view(text: str) -> str:
    return re.sub(r"\b[a-z]\.(?=\w)|[()]", "", text)


def _pg_dump() -> Path:
    """Return the newest pg_dump of the embedded server's wheel: it reads every older server."""
    found = cluster.binaries(Path(tempfile.gettempdir()), None)
    return found / "pg_dump"


def pages(dsn: str) -> dict[str, str]:
    """Each generated page's text by its path from the root, for the database of this DSN."""
    return {
        "docs/configuration.md": configuration(),
        "docs/schema.md": schema(catalog.read(dsn)),
        "docs/schema.sql": dump(dsn),
    }


def _database(stack: ExitStack) -> str:
    """The DSN of a fresh database with the schema, on the server that the tests would use."""
    from queue_workflows import db
    from tests.support import database

    given = os.environ.get("QUEUE_WORKFLOWS_TEST_DB_URL")
    url = database.forced(given) if given else stack.enter_context(database.throw_away_server())
    own = stack.enter_context(database.Database(url))
    with database.environment(QUEUE_WORKFLOWS_DB_URL=own.dsn):
        db.bootstrap()
        db.close_pool()
    return own.dsn


def main() -> int:
    """Write the pages; with `--check` only say which differ, exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.docgen")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    with ExitStack() as stack:
        made = pages(_database(stack))
    stale = [name for name, text in made.items() if _old(name) != text]
    for name in stale:
        if not options.check:
            (ROOT / name).write_text(made[name], encoding="utf-8")
        print(f"{name}: {'differs' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def _old(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
