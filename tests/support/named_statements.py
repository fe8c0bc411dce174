"""The SQL statements of the library, which are the files of `queue_workflows/sql/queries/`."""

from __future__ import annotations

from queue_workflows import sql
from queue_workflows.db import statements


def texts() -> dict[str, bytes]:
    """Return each statement by `file.name`, or `file.name[table]` if there is one for each table.

    Parameters are those of psycopg, such as `%(name)s`.
    """
    found: dict[str, bytes] = {}
    for path in sorted(sql.QUERIES.glob("*.sql")):
        for name, one in statements.parse(path.read_text("utf-8"), path.name).items():
            if one.text is not None:
                found[f"{path.stem}.{name}"] = one.text
            for table, text in (one.texts or {}).items():
                found[f"{path.stem}.{name}[{table}]"] = text
    return found
