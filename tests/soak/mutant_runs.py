"""Run the soak once per mutant, and print which checks found it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.soak import mutants, report, run, server

MUTANT_S = 40.0
END_S = 90.0
"""A soak that is interrupted undoes its faults and ends its fleet and its server."""
CAUGHT = "caught by: "


def say(text: str, made: report.Report) -> bool:
    """Print who caught these mutants, on the last line; whether the expected checks did."""
    wanted = {mutants.MUTANTS[name].caught_by: None for name in mutants.names(text)}
    print(f"\nmutant {text}; expected: {', '.join(wanted)}")
    found = [f"{check} ({len(made.found[check])})" for check in made.caught()]
    print(CAUGHT + (", ".join(found) or "NOTHING"))
    return wanted.keys() <= {*made.caught()}


def run_all(seed: int, page: Path | None) -> int:
    """Run every mutant in a process of its own, which it patches; return 1 if one is not caught."""
    with server.throw_away() as pg, run.engine(pg.dsn):
        head = f"{MUTANT_S:g} s each, seed {seed}; {run.versions()}."
    rows: list[tuple[str, str, str]] = []
    escaped: list[str] = []
    for name, mutant in mutants.MUTANTS.items():
        command = [sys.executable, "-m", "tests.soak", "--mutant", name, "--seed", str(seed)]
        code, out = _run(command)
        caught = out.rpartition(CAUGHT)[2].strip() if CAUGHT in out else "NOTHING"
        rows.append((f"`{name}`", mutant.off, caught))
        if code:
            escaped.append(name)
            print(out)
        print(f"{name:<16} {'MISSED' if code else 'caught'}  {caught}", flush=True)
    lines = [head, "", "| mutant | what is switched off | caught by (times) |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if page is not None:
        report.write(page, "mutants", "\n".join(lines))
    print(f"\n{len(rows) - len(escaped)} of {len(rows)} caught {', '.join(escaped)}")
    return 1 if escaped else 0


def _run(command: list[str]) -> tuple[int, str]:
    """Return its exit code and output; pass an interrupt on, so that it cleans up."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait(END_S)
            raise
    return process.returncode, out
