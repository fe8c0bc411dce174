"""Write metrics in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias

from queue_workflows.runtime import display

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST_LABEL: Final = 200
"""Characters of a label's value; longer ones are cut, and no control character is left."""
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
_Labels: TypeAlias = "tuple[tuple[str, str], ...]"


class Family:
    """One metric: its name, what it is, and a value for each set of labels.

    `name` is complete, so that of a counter ends in `_total`. Values whose labels are equal once
    they are cut become one, as a repeated series would spoil the whole page: counts are added, of
    the others (`largest`) the largest is kept.
    """

    def __init__(self, name: str, kind: Kind, text: str, *, largest: bool = False) -> None:
        self.name = name
        self.kind: Kind = kind
        self.text = text
        self._largest = largest
        self._values: dict[tuple[str, _Labels], float] = {}

    def add(self, value: float | None, labels: Mapping[str, str], suffix: str = "") -> None:
        """Add a value; None: unknown, so that the series is left out."""
        if value is None:
            return
        key = suffix, tuple((name, display.line(text, MOST_LABEL)) for name, text in labels.items())
        known = self._values.get(key)
        if known is None:
            self._values[key] = value
        else:
            self._values[key] = max(known, value) if self._largest else known + value

    def lines(self) -> Iterable[str]:
        """Return the lines of this metric; HELP and TYPE also where it has no value."""
        yield f"# HELP {self.name} {_help(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        for (suffix, labels), value in self._values.items():
            shown = ",".join(f'{name}="{_label(text)}"' for name, text in labels)
            yield f"{self.name}{suffix}{'{' + shown + '}' if shown else ''} {number(value)}"


def page(families: Iterable[Family]) -> str:
    """Return the page that Prometheus scrapes."""
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def number(value: float) -> str:
    """Return a number as the format writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
