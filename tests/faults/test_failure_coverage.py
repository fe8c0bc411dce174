"""Each row of the list of failures names existing tests, or lists what no test covers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults import failure_coverage

TESTS = Path(__file__).parents[1]
COUNTS = {"O": 10, "D": 11, "P": 16, "S": 9}
EVERY = [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def functions(file: Path) -> set[str]:
    """What pytest collects from a file, by name."""
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_has_tests_or_is_listed_as_open() -> None:
    assert [
        row
        for row in EVERY
        if row not in failure_coverage.COVERED and row not in failure_coverage.OPEN
    ] == []
    assert {*failure_coverage.COVERED} | {*failure_coverage.OPEN} == {*EVERY}


@pytest.mark.parametrize("row", failure_coverage.COVERED)
def test_the_tests_of_a_row_are_there(row: str) -> None:
    title, tests = failure_coverage.COVERED[row]
    assert title
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        assert name in functions(TESTS / file), test


def test_no_test_that_reproduces_a_row_is_left_out() -> None:
    covered = {test for _, tests in failure_coverage.COVERED.values() for test in tests}
    for name in ("ownership", "dispatch_faults", "server_faults"):
        file = f"faults/test_{name}.py"
        assert {f"{file}::{test}" for test in functions(TESTS / file)} <= covered
