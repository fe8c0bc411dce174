"""`python -m tests.soak --minutes N --seed S`: 0 when clean, 1 on a violation."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.soak import mutants, report, run

QUICK_S = 60.0
MUTANT_S = 40.0


def main(argv: list[str] | None = None) -> int:
    """Soak and print; with `--mutant`, 0 when the checker caught it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument("--gap", type=float, default=2.0, metavar="S", help="mean between faults")
    parser.add_argument("--rate", type=float, default=2.0, metavar="R", help="runs a second")
    parser.add_argument("--twice", type=float, default=0.5, help="share of second answers")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="page with the markers")
    parser.add_argument(
        "--mutant", choices=sorted(mutants.MUTANTS), help="switch one defence of the engine off"
    )
    options = parser.parse_args(argv)
    seconds = QUICK_S if options.quick else options.minutes * 60
    if options.mutant and not options.quick and "--minutes" not in (argv or sys.argv):
        seconds = MUTANT_S
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made = run.soak(
            run.Options(
                seconds,
                options.seed,
                gap_s=options.gap,
                runs_s=options.rate,
                jobs_s=options.rate,
                mutant=options.mutant,
                twice=options.twice,
            )
        )
    except KeyboardInterrupt:
        print("stopped; everything that was started has ended", file=sys.stderr)
        return 130
    print("\n" + made.text())
    if options.markdown is not None:
        report.write(options.markdown, made)
    if options.mutant is None:
        return 0 if made.clean else 1
    wanted = mutants.MUTANTS[options.mutant].caught_by
    caught = made.caught()
    print(
        f"\nmutant {options.mutant}: caught by {', '.join(caught) or 'NOTHING'}; expected: {wanted}"
    )
    return 0 if wanted in caught else 1


if __name__ == "__main__":
    raise SystemExit(main())
