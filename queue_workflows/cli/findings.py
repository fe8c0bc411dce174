"""Define what `doctor` and `connect` report: findings with a level and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from queue_workflows.cli import output

OK, WARNING, ERROR = "ok", "warning", "error"


class Finding(NamedTuple):
    """One line: what was checked, its level (`ok`, `warning`, `error`), and what to do."""

    check: str
    level: str
    text: str
    remedy: str = ""


Findings: TypeAlias = Iterator[Finding]


def show(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")
