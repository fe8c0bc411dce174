"""Run `python -m tests.soak --minutes N --seed S`; exit with 0 when clean, 1 on a violation."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.soak import mutant_runs, mutants, report, run

QUICK_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Run the soak and print the report; with `--mutant` return 0 if it is caught."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.mutants:
            return mutant_runs.run_all(options.seed, options.markdown)
        return _soak(options)
    except KeyboardInterrupt:
        print("stopped; everything that was started has ended", file=sys.stderr)
        return 130


def _soak(options: argparse.Namespace) -> int:
    seconds = mutant_runs.MUTANT_S if options.mutant else 180.0
    if options.quick:
        seconds = QUICK_S
    elif options.minutes is not None:
        seconds = options.minutes * 60
    made = run.soak(
        run.Options(
            seconds,
            options.seed,
            gap_s=options.gap,
            runs_s=options.rate,
            jobs_s=options.rate,
            orders_s=options.rate * 0.6,
            mutant=options.mutant,
            twice=options.twice,
            hostile_s=options.hostile,
            older=options.older,
        )
    )
    print("\n" + made.text())
    if options.mutant:
        return 0 if mutant_runs.say(options.mutant, made) else 1
    if options.markdown is not None:
        report.write(options.markdown, "soak", made.markdown())
    return 0 if made.clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=_positive, metavar="N", help="default: 3")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument(
        "--gap", type=_positive, default=2.0, metavar="S", help="mean between faults"
    )
    parser.add_argument("--rate", type=_positive, default=2.0, metavar="R", help="runs a second")
    parser.add_argument("--twice", type=float, default=0.5, help="share of second answers")
    parser.add_argument(
        "--hostile", type=_positive, default=3.0, metavar="R", help="hostile rows a second"
    )
    parser.add_argument(
        "--older", metavar="REV", help="one worker runs this revision of the checkout"
    )
    parser.add_argument("--markdown", type=_page, metavar="FILE", help="page with the markers")
    parser.add_argument(
        "--mutant",
        type=_mutants,
        metavar="NAME[,NAME]",
        help="switch off one or several defences of the engine, for "
        f"{mutant_runs.MUTANT_S:g} s by default: {', '.join(sorted(mutants.MUTANTS))}",
    )
    parser.add_argument(
        "--mutants", action="store_true", help="every mutant once, one after the other"
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _mutants(text: str) -> str:
    try:
        return ",".join(mutants.names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _page(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no page {text}")
    return Path(text)


if __name__ == "__main__":
    raise SystemExit(main())
