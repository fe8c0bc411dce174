"""A bounded sweep finds nothing, and a sweep of a broken engine names the row.

`python -m tests.hostile` tries every value of every column and role; this tries a part of them.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.hostile import extreme_values, fleet, row_changes, sweep, writable_columns
from tests.support.database import Database

SEED = 13
pytestmark = pytest.mark.timeout(300)


def test_no_row_of_a_role_that_submits_stops_anything(own_database: Database) -> None:
    assert_clean(own_database, "submit", most=200, pairs=50)


def test_no_row_of_a_role_that_works_stops_anything(own_database: Database) -> None:
    assert_clean(own_database, "work", most=160, pairs=40)


def assert_clean(server: Database, purpose: str, *, most: int, pairs: int) -> None:
    """Sweep a seeded sample of the role's columns and values in one or two batches."""
    rng = random.Random(f"{SEED} {purpose}")
    ends = time.monotonic() + 60.0
    with (
        sweep.Ground(server, fleet.SEATS) as ground,
        sweep.Sweep(ground, purpose, print, ends=ends) as swept,
    ):
        changes = sweep.chosen(swept.arena.tables, rng, most=most, pairs=pairs)
        for batch in sweep.batches(changes, 250):
            swept.batch(batch)
        assert swept.tried >= most + pairs
        assert swept.accepted > 0
        assert not swept.problems, "\n".join([f"seed {SEED}", *swept.problems])


def test_a_row_that_stops_a_queue_is_found_and_named(own_database: Database) -> None:
    """A trigger that pauses a queue for one value stands for a hole."""
    with (
        sweep.Ground(own_database, fleet.SEATS) as ground,
        sweep.Sweep(ground, "submit", print, bound_s=5.0) as swept,
    ):
        ground.alter(
            "CREATE FUNCTION hole() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN"
            " INSERT INTO queue_settings (queue, paused_at) VALUES ('solo', now())"
            " ON CONFLICT DO NOTHING; RETURN NULL; END $$;"
            " CREATE TRIGGER hole AFTER INSERT ON ingest_jobs FOR EACH ROW"
            " WHEN (NEW.reason = '{x}') EXECUTE FUNCTION hole()"
        )
        column = swept.arena.tables["ingest_jobs"].columns["reason"]
        tried = [
            value for value in extreme_values.extremes(column) if value.name in ("{x}", "null")
        ]
        changes = [
            row_changes.Change(number, "ingest_jobs", writable_columns.INSERT, (("reason", value),))
            for number, value in enumerate(tried)
        ]
        assert len(changes) == 2
        swept.batch(changes)
        (problem,) = swept.problems
    assert problem.startswith("submit: INSERT ingest_jobs: reason = '{x}'\n")
    assert "normal job of queue solo is queued" in problem


def test_a_type_that_nobody_thought_of_is_refused() -> None:
    column = writable_columns.Column(
        "t", "c", "point", "point", False, True, True, (), is_key=False, refers_to=None
    )
    with pytest.raises(KeyError):
        extreme_values.extremes(column)
