"""Tests notice changes of the SQL: some of the list's mutants, and reports of what is wrong.

`python -m tests.mutation.sql` runs the whole list.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import sql

CHOSEN = (
    "claim-node-priority",
    "claim-ingest-off",
    "renew-worker",
    "record-node-claim",
    "record-fail-attempts",
    "recover-cap",
    "admit-key-held",
    "trigger-terminal-job",
    "stream-claim",
    "log-head",
    "event-wait-key",
    "schedule-claim-once",
)
"""One or two of each area, each killed by a test that is quick."""
TEST = "integration/test_node_queue.py::test_the_claim_takes_priority_then_age"
CLAIM = """
file = "functions/claim_node.sql"
within = "FUNCTION queue_workflows_node_step("
"""
ORDER = "ORDER BY q.required_version, q.priority, q.seq LIMIT 1"
FIRST = "{node:first(q)}"
"""The fragment that this order is."""


def test_some_mutants_of_each_area_are_killed(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = sql.main(["--only", f"^(?:{'|'.join(CHOSEN)})$"], dsn=dsn)
    told = capsys.readouterr()
    assert (code, told.err.strip()) == (0, ""), told.out
    assert told.out.count("killed") == len(CHOSEN)


def test_what_the_list_gets_wrong_is_reported(
    tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "mutants.toml"
    changes = {
        "comment": ("-- An overflow host finds no job", "-- An overflow machine finds no job", ""),
        "listed": ("-- An overflow host finds no job", "-- Nobody finds a job", "a comment"),
        "stale": (FIRST, ORDER.replace("seq", "seq DESC"), "nobody notices"),
        "typo": (FIRST, ORDER.replace("seq", "sequel"), ""),
    }
    made.write_text(
        "".join(
            f"[[mutant]]\nname = '{name}'{CLAIM}before = '{before}'\nafter = '{after}'\n"
            f"breaks = ''\ntests = ['{TEST}']\nsurvives = '{reason}'\n"
            for name, (before, after, reason) in changes.items()
        )
    )
    assert sql.main(["--list", str(made)], dsn=dsn) == 1
    told = capsys.readouterr()
    lines = sorted(told.err.splitlines())
    assert [line.partition(":")[0] for line in lines] == [
        "2 of 4 survive, more than 5%",
        "comment",
        "stale",
        "typo",
    ]
    assert "no test fails" in lines[1]
    assert f"{TEST} kills it" in lines[2]
    assert "cannot be judged" in lines[3] and "sequel does not exist" in lines[3]
    assert told.out.count("SURVIVED") == 2


def test_tests_that_fail_without_a_mutant_judge_nothing(dsn: str) -> None:
    (mutant,) = (each for each in sql.listed() if each.name == CHOSEN[0])
    with pytest.raises(RuntimeError, match="without a mutant: pytest exits with 4"):
        list(sql.run([mutant._replace(tests=["integration/test_gone.py"])], dsn))
