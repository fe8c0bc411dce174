"""Run a suite; run the tests that fail again, alone, once; note as flaky the ones that pass then.

`rerun.py --python PYTHON --flaky FILE -- COMMAND...`: the command is a pytest run. FILE gets the
name and the first traceback of each flaky test of all suites. Exits as the suite did, or with 0 if
every failed test has passed alone. More than three flaky tests in all count as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3
TESTS_FAILED = 1
"""pytest's exit code for a session that ran to its end. Any other one is no matter of luck."""


def failures(path: Path) -> dict[str, str]:
    """Return the first traceback of each failed test by its name, as `tests/conftest.py` wrote."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        found.setdefault(told["test"], told["traceback"])
    return found


def passes_alone(python: str, test: str) -> bool:
    print(f"\n=== again, alone: {test}", flush=True)
    command = [python, "-m", "pytest", "-q", "-m", "", "-p", "no:randomly", test]
    env = {name: value for name, value in os.environ.items() if name != "QW_TEST_FAILURES"}
    return subprocess.run(command, env=env, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--flaky", required=True, type=Path)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "failures")
        env = {**os.environ, "QW_TEST_FAILURES": str(told)}
        code = subprocess.run(given.command, env=env, check=False).returncode
        failed = failures(told)
    before = given.flaky.read_text().count("\nFLAKY ") if given.flaky.exists() else 0
    if code != TESTS_FAILED or not failed or before + len(failed) > MOST:
        return code
    again = [test for test in failed if not passes_alone(given.python, test)]
    with given.flaky.open("a") as flaky:
        for test, traceback in failed.items():
            if test not in again:
                flaky.write(f"\nFLAKY {test}\n{traceback}\n")
    return TESTS_FAILED if again else 0


if __name__ == "__main__":
    sys.exit(main())
