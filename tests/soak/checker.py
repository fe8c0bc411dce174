"""List the checks of the soak; each takes the evidence and returns its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.soak import (
    check_charges,
    check_claims,
    check_fires,
    check_growth,
    check_jobs,
    check_liveness,
    check_recovery,
    check_results,
    check_streams,
    evidence,
)

CHECKS: dict[str, Callable[[evidence.Evidence], Iterator[str]]] = {
    "lost": check_results.lost,
    "stuck": check_results.stuck,
    "double-finalised": check_claims.double,
    "finalised by a superseded claim": check_claims.superseded,
    "overlapping handlers, the older one wrote": check_claims.overlapping,
    "handlers that outlived their claim": check_claims.outlived,
    "handlers without a claim of their own": check_claims.twice,
    "results without their handler": check_results.unbacked,
    "nodes that ran too early": check_results.too_early,
    "wrong outcomes": check_results.outcome,
    "claims taken back without a fault": check_claims.crashes,
    "crashes charged without evidence": check_charges.charged,
    "deaths by handlers that nobody charged": check_charges.missed,
    "claimed before the last claim ended": check_claims.executions,
    "doubled or missed fires": check_fires.fires,
    "graphs that grew wrongly": check_growth.grown,
    "steps that ran again": check_growth.stepped,
    "waits that ended wrongly": check_growth.waited,
    "streams that readers got wrongly": check_streams.read,
    "answers": check_results.answers,
    "claimed after a cancel or while OFF": check_results.forbidden,
    "one key, more than one job": check_jobs.keyed,
    "two jobs of a lock key at once, or out of order": check_jobs.locked,
    "more at once than a limit allows": check_jobs.crowded,
    "more starts than a rate allows": check_jobs.hurried,
    "claimed while paused": check_jobs.paused,
    "attempts miscounted or beyond the last": check_jobs.attempts,
    "normal jobs and runs that waited too long": check_liveness.waited,
    "commands, logs and folders": check_liveness.shown,
    "hostile roles that succeeded": check_liveness.rights,
    "held up by a stranger's transaction": check_liveness.blocked,
    "texts that changed on their way": check_liveness.changed,
    "terminal rows moved": check_results.moved,
    "invariants": check_results.broken,
    "transactions open too long": check_results.slow,
    "recovered later than promised": check_recovery.late,
}


def check(seen: evidence.Evidence) -> dict[str, list[str]]:
    """Return the findings of every check, by its name."""
    return {name: list(judge(seen)) for name, judge in CHECKS.items()}
