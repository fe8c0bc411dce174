"""Define mutants of streams: what is left at the end, and the numbers of parts."""

from __future__ import annotations

from queue_workflows.db import statements
from queue_workflows.tasks import attempt_requests
from tests.soak.mutant import Mutant, replace, rewrite

CAUGHT_BY = "streams that readers got wrongly"
JOBS = {"streams": 36}


def _forget_the_rest() -> None:
    """End an attempt without storing the parts that are not sent yet."""
    replace(attempt_requests.StreamParts, "rest", lambda *_: None)
    replace(attempt_requests.StreamParts, "flush", lambda *_: None)


def _skip_a_number() -> None:
    """Number the parts of each later batch of an attempt from one more on."""
    number = b"%(first)s + given.n - 1, given.name"
    later = b"%(first)s + given.n - (%(first)s = 1)::integer, given.name"
    rewrite(statements.job_parts.add, number, later)


MUTANTS = {
    "stream-rest": Mutant(
        "an attempt ends without the last parts of its stream", CAUGHT_BY, _forget_the_rest,
        jobs=JOBS,
    ),
    "stream-numbers": Mutant(
        "later batches of a stream skip a number", CAUGHT_BY, _skip_a_number, jobs=JOBS
    ),
}  # fmt: skip
