"""The SQL functions that name a rule, `queue_workflows_is_...`, cost no call: they are inlined."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from queue_workflows import sql
from queue_workflows.db import statements

_CALL = b"queue_workflows_is_"
# Values that no condition becomes false of, which would take the rule out of the plan.
_GIVEN: dict[str, Any] = {
    "days": 1.0, "first": "(0,0)", "end": "(1,0)", "ids": ["x"], "aside": ["x"], "limit": 1,
    "queue": "q", "partition": "p", "at": None, "lasts": None, "by": None, "stale_s": 1.0,
}  # fmt: skip


def _texts() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(sql.QUERIES.glob("*.sql")):
        for name, one in statements.parse(path.read_text("utf-8"), path.name).items():
            for text in [one.text] if one.text else (one.texts or {}).values():
                if _CALL in text:
                    found[f"{path.stem}.{name}"] = text
    return found


@pytest.mark.parametrize("name", _texts())
def test_no_plan_calls_it(db: ModuleType, name: str) -> None:
    with db.connect() as conn:
        rows = conn.execute(b"EXPLAIN VERBOSE " + _texts()[name], _GIVEN).fetchall()
    plan = "\n".join(row["QUERY PLAN"] for row in rows)
    assert _CALL.decode() not in plan
    if not name.startswith("queues.pause_"):  # EXPLAIN does not show what ON CONFLICT sets.
        assert "now()" in plan
