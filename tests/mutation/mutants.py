"""Make the mutants of a module by cosmic-ray's operators, and one operator of our own."""

from __future__ import annotations

import ast
import difflib
from typing import Any, NamedTuple

import parso
from cosmic_ray import ast as cosmic_ast
from cosmic_ray import mutating, plugins
from cosmic_ray.operators import operator

from tests.mutation import targets

_SWAPS = {"all": "any", "any": "all", "min": "max", "max": "min", "in": "not in", "not in": "in"}


class Change(NamedTuple):
    """A mutant by the text of its change, which lasts when lines above it come and go."""

    module: str
    before: str
    after: str


class Place(NamedTuple):
    """One application of an operator: its name, and which one of a module's places."""

    module: str
    operator: str
    occurrence: int


class Swap(operator.Operator):
    """Swap `all` and `any`, `min` and `max`, `in` and `not in`; neither mutation tester does."""

    def mutation_positions(self, node: Any) -> Any:
        if _swapped(node) is not None:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.parse(f" {_swapped(node)}")

    @classmethod
    def examples(cls) -> Any:
        return (operator.Example("all(x)", " any(x)"),)


def _swapped(node: Any) -> str | None:
    """Return what stands for this node in a mutant, or None."""
    text = " ".join(node.get_code().split())
    if text in ("all", "any", "min", "max"):
        called = node.type == "name" and node.parent.type in ("atom_expr", "power", "trailer")
        return _SWAPS[text] if called or getattr(node.parent, "type", "") == "arglist" else None
    compared = getattr(node.parent, "type", "") == "comparison"
    return _SWAPS.get(text) if compared and node.type in ("keyword", "comp_op") else None


def places(module: str, source: str) -> list[Place]:
    """Return every place of a module's text at which an operator makes a mutant."""
    nodes = [*cosmic_ast.ast_nodes(cosmic_ast.get_ast(source))]
    found: list[Place] = []
    for name in targets.OPERATORS:
        made = _operator(name)
        count = sum(len([*made.mutation_positions(node)]) for node in nodes)
        found += [Place(module, name, number) for number in range(count)]
    return found


def _operator(name: str) -> Any:
    return Swap() if name == "Swap" else plugins.get_operator(f"core/{name}")()


def mutated(place: Place, source: str) -> tuple[Change, str] | None:
    """Return a mutant's change and text; None if it changes annotations alone, or is no Python."""
    text = mutating.mutate_code(source, _operator(place.operator), place.occurrence)
    if text is None or _meaning(text) in (None, _meaning(source)):
        return None
    diff = difflib.unified_diff(source.splitlines(), text.splitlines(), lineterm="", n=0)
    lines = [(line[0], " ".join(line[1:].split())) for line in [*diff][3:]]
    before, after = (" ".join(text for mark, text in lines if mark == kind) for kind in "-+")
    # The mark of keyword-only parameters is no product.
    if "TYPE_CHECKING" in before or after.replace("/,", "*,") == before:
        return None
    return Change(place.module, before, after), text


class _NoAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _meaning(text: str) -> str | None:
    try:
        return ast.dump(_NoAnnotations().visit(ast.parse(text)))
    except (SyntaxError, ValueError):
        return None
