"""Write `queue_workflows/db/statements.pyi`, from which type checkers know every statement.

Run `python -m tests.support.stubgen` after a change in `sql/queries/`; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from queue_workflows import sql
from queue_workflows.db import statements

STUB = Path(statements.__file__).with_suffix(".pyi")
_HEAD = '''"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

def comments(noun: str) -> dict[str, str]: ...
'''


def stub() -> str:
    """Return the stub: one class a file, one attribute a statement, documented by its comment."""
    parts = [_HEAD]
    for path in sorted(sql.QUERIES.glob("*.sql")):
        kind = "".join(word.title() for word in path.stem.split("_"))
        parts.append(f"class _{kind}:")
        found = statements.parse(path.read_text(encoding="utf-8"), path.name)
        parts += [
            f'    {name}: {"bytes" if one.text else "Mapping[str, bytes]"}\n    """{_text(one)}"""'
            for name, one in found.items()
        ]
        parts.append(f"\n{path.stem}: _{kind}\n")
    return "\n".join(parts)


def _text(one: statements.Statement) -> str:
    return one.comment.replace("\\", "\\\\").replace("\n", "\n    ")


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
