"""`python examples/local_models`: read the digits, print how many were right."""

from __future__ import annotations

import sys

import digits


def main() -> int:
    found = digits.run()
    for error in found["failed"]:
        print(f"failed: {error}")
    print(
        f"{found['right']} of {found['read']} images read right, {found['jobs']} jobs,"
        f" {digits.THREADS} threads, {found['loads']} load"
    )
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
