"""The list of SQL mutants fits the SQL: each change has one place, and its tests exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.mutation import checkouts, sql

TESTS = Path(__file__).parents[1]
MUTANTS = sql.listed()
AREAS = {
    "claim", "renew", "record", "recover", "admit", "trigger", "right", "stream", "log", "event",
    "schedule",
}  # fmt: skip


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_a_mutant_changes_one_place_and_names_tests_that_exist() -> None:
    for mutant in MUTANTS:
        text = (checkouts.ROOT / sql.SQL / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied(text) != text, mutant.name
        assert mutant.tests and mutant.breaks.endswith("."), mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in {"", *functions(file)}, (mutant.name, test)


def test_every_area_has_mutants() -> None:
    assert {mutant.name.partition("-")[0] for mutant in MUTANTS} == AREAS


def test_a_change_with_two_places_or_none_is_refused() -> None:
    mutant = sql.Mutant("m", "f.sql", "a", "b", "It breaks.", ())
    assert mutant.applied("x a") == "x b"
    for text in ("a a", "x"):
        with pytest.raises(ValueError, match="m: `before` occurs"):
            mutant.applied(text)
    part = mutant._replace(within="FUNCTION f(")
    assert part.applied("CREATE FUNCTION f( a\nCREATE a") == "CREATE FUNCTION f( b\nCREATE a"
    with pytest.raises(ValueError, match="m: `within` occurs 0 times"):
        part.applied("a")
