"""Every check takes the evidence and gives what is wrong, one line each; none is the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.soak import (
    evidence,
    judge_claims,
    judge_fires,
    judge_jobs,
    judge_liveness,
    judge_recovery,
    judge_results,
)

CHECKS: dict[str, Callable[[evidence.Evidence], Iterator[str]]] = {
    "lost": judge_results.lost,
    "stuck": judge_results.stuck,
    "double-finalised": judge_claims.double,
    "finalised by a superseded claim": judge_claims.superseded,
    "overlapping bodies, the older one wrote": judge_claims.overlapping,
    "bodies that outlived their claim": judge_claims.outlived,
    "bodies without a claim of their own": judge_claims.twice,
    "results without their body": judge_results.unbacked,
    "nodes that ran too early": judge_results.too_early,
    "wrong outcomes": judge_results.outcome,
    "crashes counted without a fault": judge_claims.crashes,
    "crashes charged without evidence": judge_claims.charged,
    "claimed before the last claim ended": judge_claims.executions,
    "doubled or missed fires": judge_fires.fires,
    "answers": judge_results.answers,
    "claimed after a cancel or while OFF": judge_results.forbidden,
    "one key, more than one job": judge_jobs.keyed,
    "lock keys held twice or out of order": judge_jobs.locked,
    "more at once than a limit allows": judge_jobs.crowded,
    "more starts than a rate allows": judge_jobs.hurried,
    "claimed while paused": judge_jobs.paused,
    "attempts miscounted or beyond the last": judge_jobs.attempts,
    "innocents charged below a parent": judge_jobs.innocents,
    "innocents that waited too long": judge_liveness.waited,
    "commands, logs and folders": judge_liveness.shown,
    "hostile roles that got their way": judge_liveness.rights,
    "terminal rows moved": judge_results.moved,
    "invariants": judge_results.broken,
    "transactions open too long": judge_results.slow,
    "recovered later than promised": judge_recovery.late,
}


def check(seen: evidence.Evidence) -> dict[str, list[str]]:
    """Every check by its name, with what it found."""
    return {name: list(judge(seen)) for name, judge in CHECKS.items()}
