"""Build migration folders and read a database's catalog, for tests of the schema."""

from __future__ import annotations

import shutil
from pathlib import Path

from queue_workflows import db, migrations

_CATALOGUE = """
SELECT 'column ' || c.relname || '.' || a.attname AS item,
       format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
       || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '') AS text
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')
UNION ALL
SELECT 'options ' || relname, coalesce(reloptions::text, '') FROM pg_class
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'S', 'v')
UNION ALL
SELECT 'constraint ' || coalesce(conrelid::regclass::text, 'domain') || ' ' || conname,
       pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace = 'public'::regnamespace AND contype <> 'n'
UNION ALL
SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL
SELECT 'trigger ' || tgname, pg_get_triggerdef(t.oid) FROM pg_trigger t
  JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = 'public'::regnamespace AND NOT tgisinternal
UNION ALL
SELECT 'function ' || oid::regprocedure, pg_get_functiondef(oid) FROM pg_proc
 WHERE pronamespace = 'public'::regnamespace AND prokind = 'f'
UNION ALL
SELECT 'domain ' || typname, typtype::text FROM pg_type
 WHERE typnamespace = 'public'::regnamespace AND typtype = 'd'
"""


def catalogue(conn: db.Connection) -> dict[str, str]:
    """Return everything that a migration creates, by kind and name, in any order of columns."""
    return {row["item"]: row["text"] for row in conn.execute(_CATALOGUE).fetchall()}


def chain_up_to(version: int, folder: Path) -> Path:
    """Return a folder with our own chain up to that version."""
    folder.mkdir(exist_ok=True)
    for path in migrations.dir().glob("*.sql"):
        if int(path.name[:4]) <= version:
            shutil.copy(path, folder / path.name)
    return folder


def write_chain(folder: Path, **texts: str) -> Path:
    """Return a folder with these migrations: `_0001_name="..."`, `_0001_name_down="..."`."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        stem = name.lstrip("_")
        if stem.endswith("_down"):
            stem = stem.removesuffix("_down") + ".down"
        (folder / f"{stem}.sql").write_text(text)
    return folder


def ours(*, down: bool = False) -> list[Path]:
    """Return the files of our own chain that apply its migrations, or revert them, in order."""
    return sorted(
        path for path in migrations.dir().glob("*.sql") if path.name.endswith(".down.sql") == down
    )
