"""List the extreme values of each type, as text that PostgreSQL casts to the column's type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from tests.hostile import folders, writable_columns

ESCAPE, OVERRIDE, MARKUP = "\x1b[31m\x1b]0;owned\x07", "\u202eabc\u2066", "[red]x[/] [/]"
FORGED_LINE = "2026-01-01T00:00:00 ERROR forged"
HUGE = 10 * 1024 * 1024


class Value(NamedTuple):
    """One value: what a report calls it, and its text; None is NULL."""

    name: str
    text: str | None
    heavy: bool = False
    """It is megabytes long: the sweep in the suite uses few of these."""


def _named(*texts: str) -> list[Value]:
    return [Value(text, text) for text in texts]


def _integers(bits: int) -> list[Value]:
    most = 2 ** (bits - 1) - 1
    return _named(str(-most - 1), "-1", "0", "1", str(most - 1), str(most))


_TIMES = _named(
    "infinity", "-infinity", "294276-12-31 23:59:59+00", "4713-01-01 00:00:00+00 BC",
    "1969-12-31 23:59:59+00", "1999-12-31 23:59:59+00", "2000-01-01 00:00:00+00",
    "9999-12-31 23:59:59.999999+00", "10000-01-01 00:00:00+00",
)  # fmt: skip
_FLOATS = _named("NaN", "Infinity", "-Infinity", "-1", "0", "-0", "1e-9")
_TEXTS = [
    *_named("", " ", "null", "0", "-1", "NaN", "-x", "--help", "%s %(x)s %", "{x}", "x';--"),
    *_named("../../x", "/etc", "..", "a/b/../..", "@/etc/passwd", "__input__x", "*"),
    Value("escape sequences", ESCAPE),
    Value("bidirectional controls", OVERRIDE),
    Value("C1 and invisible characters", "a\x9b31mb\u200b\u2028c\u2060\ufeff\U000e0041"),
    Value("control characters", "a\x01\x07\x08\x7f\rb"),
    Value("a newline and a forged log line", f"x\n{FORGED_LINE}"),
    Value("markup", MARKUP),
    Value("300 characters", "n" * 300),
    Value("5,000 characters", "w" * 5_000),
    Value("2,000 wide characters", "\U0001f600" * 2_000),
    Value("10 MiB", "x" * HUGE, heavy=True),
]


def nested(depth: int, *, objects: bool = False) -> str:
    """Return JSON text of so many levels."""
    start, end = ('{"a":', "}") if objects else ("[", "]")
    return start * depth + "1" + end * depth


def _json() -> Iterator[Value]:
    yield from _named("null", "true", "7", '"text"', "[]", "[1]", "{}", '[{"a": [null]}]')
    for number in ("1e5000", "-1e5000", "1e-5000", "1e308", "9" * 5_000, "0." + "3" * 5_000):
        yield Value(f"the number {number[:8]} ({len(number)} characters)", number)
        yield Value(f"a member that is {number[:8]} ({len(number)})", f'{{"n": {number}}}')
    for depth in (63, 127, 150, 1_200, 5_000):
        yield Value(f"arrays, {depth} levels", nested(depth))
        yield Value(f"objects, {depth} levels", nested(depth, objects=True))
        yield Value(f"a member of {depth} levels", f'{{"deep": {nested(depth)}}}')
    odd = ["", " ", "a.b", "$from", "$value", "__class__", ESCAPE, OVERRIDE, MARKUP, "k" * 5_000]
    yield Value("odd keys", json.dumps({key: key for key in odd}))
    yield Value("keys that differ in case and space", '{"a": 1, "A": 2, "a ": 3, " a": 4}')
    yield Value("an unknown reference", '{"x": {"$from": "no.such.thing"}}')
    yield Value("references below references", '{"$from": {"$from": {"$from": "a"}}}')
    words = ("timeout_s", "budget_s", "max_attempts", "backoff", "retry", "kind", "nodes", "steps")
    for bad in ('"abc"', "-1", "1e400", "[]", "null", '"NaN"'):
        yield Value(
            f"known keys that are {bad}",
            f"{{{', '.join(f'{json.dumps(w)}: {bad}' for w in words)}}}",
        )
    yield Value("10,000 members", json.dumps({f"k{n}": n for n in range(10_000)}))
    yield Value("a text of 10 MiB", json.dumps("x" * HUGE), heavy=True)
    yield Value("a million numbers", json.dumps([0] * 1_000_000), heavy=True)


_ARRAYS = [
    *_named("{}", "{NULL}", "{{a,b},{c,d}}", '{""}'),
    Value("escape sequences", '{"' + ESCAPE + '"}'),
    Value("10,000 elements", "{" + ",".join(f"e{n}" for n in range(10_000)) + "}"),
]
_BY_TYPE: dict[str, list[Value]] = {
    "timestamp with time zone": _TIMES,
    "smallint": _integers(16),
    "integer": _integers(32),
    "bigint": _integers(64),
    "real": [*_FLOATS, *_named("3e38", "-3e38", "1e-45")],
    "double precision": [*_FLOATS, *_named("1e308", "-1e308", "5e-324")],
    "boolean": _named("true", "false"),
    "text": _TEXTS,
    "jsonb": [*_json()],
    "text[]": _ARRAYS,
    "pg_snapshot": _named("1:1:", "3:5:3,4", "9223372036854775807:9223372036854775807:"),
}
_STATES = _named("queued", "running", "completed", "failed", "cancelled", "of the app")


def of_type(base: str) -> list[Value]:
    """Return the light extreme values of a type, none for an unknown one, and NULL."""
    found = [value for value in _BY_TYPE.get(base, []) if not value.heavy]
    return [*found, Value("NULL", None)]


def extremes(column: writable_columns.Column) -> list[Value]:
    """Return the values to try in a column; raise KeyError for an unknown type."""
    found = [*_BY_TYPE[column.base], Value("NULL", None)]
    if column.name == "out_dir":
        # Without confinement a worker would make these, wherever on this machine they lead.
        found = [value for value in found if value.text is None or "/" not in value.text]
        found += _named(*folders.FORBIDDEN)
    if column.name == "status":
        found += _STATES
    found += _named(*column.words)
    return [*{value.name: value for value in found}.values()]
