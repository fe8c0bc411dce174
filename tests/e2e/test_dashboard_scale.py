"""The pages over many rows: few statements, none of which reads a whole table, and small answers.

`python -m benchmarks.pages` measures their times over a million runs.
"""

from __future__ import annotations

import pytest

from benchmarks import pages
from queue_workflows import db
from tests.support import tabled

RUNS, ITEMS = 40_000, 2_000
"""More rows than a page may read, in a few seconds."""


def test_pages_read_few_rows_of_many(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with db.connect(limited=False) as conn:
        pages.fill(conn, RUNS, ITEMS)
    try:
        found = pages.measure(times=2, watched_s=10.0)
    finally:
        db.close_pool()
    assert found.rate <= pages.RATE, "for all viewers together"
    assert len(found.figures) == len(pages.PAGES)
    for each in found.figures:
        with tabled.case(each.page.name):
            assert each.raw_kb > 2
            assert not each.faults(), each
