"""Hold the SQL of the engine as package data: functions, triggers and queries.

`queries/` has the statements by noun, `functions/` and `triggers/` the set that `db.functions`
installs, and `privileges.sql` the rights to its functions. `db/` has the SQL of migrations and
of the catalog in Python: it runs before this schema exists, or on databases without it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
QUERIES = FOLDER / "queries"
