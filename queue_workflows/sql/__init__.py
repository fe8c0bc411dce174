"""Hold the SQL of the engine as package data: functions, triggers and queries.

`queries/` has the statements by noun, `functions/` and `triggers/` the set that `db.functions`
installs, and `privileges.sql` the rights to its functions. `development_chain.sql` converts the
database of a development build. What takes names of tables or databases that are not known before,
which no parameter can be, is composed in `db/`; `tests/unit/test_sql_in_files.py` lists it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
QUERIES = FOLDER / "queries"
