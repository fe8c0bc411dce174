"""The start of an id is looked up by ranges of an index, in every collation."""

from __future__ import annotations

import uuid

from psycopg import sql

from queue_workflows import db
from queue_workflows.cli import ids as id_search
from queue_workflows.db import statements
from tests.support import factories


def test_the_start_of_an_id_is_a_range_of_the_index(conn: db.Connection) -> None:
    ids = [str(uuid.uuid4()) for _ in range(300)]
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name) SELECT unnest(%s::text[]), 'w'", (ids,)
    )
    for start in (ids[0], ids[0][:13], ids[0][:9], ids[0][:8], ids[0][:1]):
        wanted = sorted(one for one in ids if one.startswith(start))
        found = id_search.starting_with(conn, start, limit=400)
        assert [(row["kind"], row["id"]) for row in found] == [("run", one) for one in wanted]
    for start in ("x", "0" * 37, "A", "%", "ab-", "-"):
        assert id_search.starting_with(conn, start, limit=400) == []


COLLATIONS = (
    "SELECT collname FROM pg_collation WHERE collencoding IN (-1, 6)"
    " AND collname = ANY (ARRAY['C', 'und-x-icu', 'sv-x-icu', 'en_US.utf8'])"
)


def test_every_collation_has_uuids_in_the_order_of_their_digits(conn: db.Connection) -> None:
    known = factories.column(conn, COLLATIONS)
    assert "C" in known
    for collation in known:
        in_order(conn, collation)


def in_order(conn: db.Connection, collation: str) -> None:
    ids = [str(uuid.uuid4()) for _ in range(1000)]
    conn.execute(
        sql.SQL("CREATE TEMP TABLE workflow_runs (id text COLLATE {} PRIMARY KEY)").format(
            sql.Identifier(collation)
        )
    )
    conn.execute("INSERT INTO workflow_runs SELECT unnest(%s::text[])", (ids,))
    conn.execute("SET enable_seqscan = off")
    seen = id_search.starting_with(conn, "a", limit=1000)
    assert sorted(row["id"] for row in seen) == sorted(one for one in ids if one[0] == "a")
    statement = b"EXPLAIN " + statements.history_rows.ids_in_range.text
    values = {"prefix": "a", "low": "a0", "high": "af", "limit": 5}
    plan = "\n".join(next(iter(row.values())) for row in conn.execute(statement, values))
    assert plan.count("Index Cond: ((id >= ") == 3, plan
    assert "Seq Scan" not in plan
    conn.execute("DROP TABLE pg_temp.workflow_runs")
