"""What `queue-workflows doctor` and `connect` report, as their commands print it."""

from __future__ import annotations

from typing import NamedTuple

from tests.support import console, database

OK, WARNING, ERROR = "ok", "warning", "error"
UNSAFE = {"fsync", "full_page_writes", "synchronous_commit"}
"""Checks of what the servers that tests start do without."""


class Finding(NamedTuple):
    """One line of a report: what was checked, its level, and what to do."""

    check: str
    level: str
    text: str
    remedy: str


def report(*argv: str) -> list[Finding]:
    """Run one of the two commands in this process; return what it reports, in order."""
    found = console.reply(*argv)
    return [Finding(**finding) for finding in found.get("findings") or found["steps"]]


def of_doctor() -> dict[str, Finding]:
    """Return what the doctor finds, by check; the worst of each."""
    found: dict[str, Finding] = {}
    for finding in report("doctor"):
        if finding.check not in found or finding.level != OK:
            found[finding.check] = finding
    return found


def doctors(check: str) -> Finding:
    """Return the doctor's worst finding of a check; there must be one."""
    return of_doctor()[check]


def wrong(found: dict[str, Finding]) -> dict[str, str]:
    """Return the levels of what is not ok, but for what the tests' own server does without."""
    return {
        name: finding.level
        for name, finding in found.items()
        if finding.level != OK and name not in UNSAFE
    }


def of_connect(dsn: str, *options: str) -> list[Finding]:
    """Return the steps of `connect` with this DSN in force, up to the first that fails."""
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        return report("connect", *options)
