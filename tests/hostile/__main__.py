"""Run `python -m tests.hostile --minutes N --seed S`; exit with 1 if a row stopped anything."""

from __future__ import annotations

import argparse
import random
import signal
import time

from tests.hostile import fleet, roles, sweep
from tests.support import database

PAIRS = 200
"""Random pairs after the single columns, and again and again while there is time."""


def main(argv: list[str] | None = None) -> int:
    """Sweep each role's columns, then random pairs until the time is over."""
    options = _parser().parse_args(argv)
    # An interrupt undoes everything; a plain SIGTERM would leave the fleet and the server behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ends = time.monotonic() + options.minutes * 60
    purposes = options.roles or [*roles.WRITES]
    print(f"seed {options.seed}, {', '.join(purposes)}, {options.minutes:g} min", flush=True)
    problems: list[str] = []
    seats = (*fleet.SEATS, *fleet.MORE)
    with database.throw_away_server() as dsn, database.Database(dsn) as server:
        server.migrate()
        for number, purpose in enumerate(purposes):
            left = ends - time.monotonic()
            until = time.monotonic() + left / (len(purposes) - number)
            with sweep.Ground(server, seats) as ground:
                problems += _one_role(ground, purpose, options, until)
    print(f"\n{len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _one_role(
    ground: sweep.Ground, purpose: str, options: argparse.Namespace, until: float
) -> list[str]:
    rng = random.Random(f"{options.seed} {purpose}")
    with sweep.Sweep(ground, purpose, lambda text: print(text, flush=True), ends=until) as swept:
        known = swept.arena.tables
        tables = {name: known[name] for name in options.tables or known if name in known}
        if not tables:
            return []
        changes = sweep.chosen(tables, rng, most=None, pairs=PAIRS)
        rng.shuffle(changes)
        print(f"{purpose}: {len(tables)} tables, {len(changes)} changes", flush=True)
        while time.monotonic() < until:
            for batch in sweep.batches(changes, options.batch):
                if time.monotonic() > until:
                    print(f"{purpose}: the time is over; not everything was tried", flush=True)
                    break
                swept.batch(batch)
            changes = sweep.chosen(tables, rng, most=0, pairs=PAIRS)
        print(
            f"{purpose}: {swept.tried} changes tried, {swept.accepted} accepted, normal work ended "
            f"within {swept.slowest_s:.1f} s, {len(swept.problems)} problems",
            flush=True,
        )
        return swept.problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="default: 30")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--batch", type=int, default=60, metavar="N", help="changes a batch")
    parser.add_argument(
        "--role", dest="roles", action="append", choices=roles.WRITES, help="default: each"
    )
    parser.add_argument(
        "--table", dest="tables", action="append", metavar="T", help="only this; default: each"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
