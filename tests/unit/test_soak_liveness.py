"""The soak's checks that hostile rows cost innocent ones nothing, on evidence made up for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.hostile import fleet
from tests.soak import acknowledged, check_liveness, evidence, tasks

LATE = check_liveness.WAIT_S + 1


def seen(claimed_at: float | None, **more: Any) -> evidence.Evidence:
    """A job and a run that were submitted at 100 s, claimed at this time, in a soak until 200 s."""
    known = acknowledged.Acknowledgements(runs={"r": "chain"}, jobs={"j": "note"})
    common = {"reason": "load", "queue": tasks.NOTES, "key": None, "epoch": 100.0} | more
    common = {"lock_key": None, "seq": 2} | common
    jobs = {"j": {**common, "run_id": None}, "n": {**common, "run_id": "r"}}
    events = {}
    if claimed_at is not None:
        worker = "machine:77:boot:random"
        events = {
            job: [
                evidence.Event(
                    job, 1, "claimed", 1, worker, "machine", tasks.NOTES, claimed_at, claimed_at
                )
            ]
            for job in jobs
        }
    none: dict[str, Any] = dict.fromkeys(
        ("fires", "lines", "faults", "off", "ended", "stuck", "invariants", "slow"), ()
    )
    return evidence.Evidence(
        **none,
        jobs=jobs,
        runs={"r": {"epoch": 100.0}},
        events=events,
        books=known,
        time=cast("Any", SimpleNamespace(at=lambda epoch: epoch)),
        began=0.0,
        ended_load=200.0,
    )


def test_innocents_that_are_claimed_in_time_are_fine() -> None:
    assert list(check_liveness.waited(seen(100 + check_liveness.WAIT_S - 1))) == []


@pytest.mark.parametrize("claimed_at", [100 + LATE, None])
def test_innocents_that_wait_too_long_are_found(claimed_at: float | None) -> None:
    found = list(check_liveness.waited(seen(claimed_at)))
    assert [text.split()[:2] for text in found] == [["job", "j"], ["run", "r"]]


def test_a_pause_of_the_queue_excuses_its_jobs() -> None:
    paused = seen(100 + LATE)
    paused.books.pauses.append(acknowledged.Pause(tasks.NOTES, None, 110.0, 120.0))
    assert [text.split()[0] for text in check_liveness.waited(paused)] == ["run"]


@pytest.mark.parametrize(
    ("key", "seq", "ended_at", "late"),
    [
        ("k", 1, 102.0, False),
        ("k", 1, 100.5, True),
        ("k", 3, 102.0, True),
        ("other", 1, 102.0, True),
        ("k", 1, 101.0 + LATE, True),
    ],
    ids=["its turn", "early", "younger", "another key", "after its claim"],
)
def test_a_job_with_a_lock_key_waits_from_the_end_of_the_job_before_it(
    key: str, seq: int, ended_at: float, late: bool
) -> None:
    found = seen(100 + LATE, lock_key="k")
    found.jobs["before"] = {**found.jobs["j"], "lock_key": key, "seq": seq}
    event = found.events["j"][0]
    found.events["before"] = [event._replace(kind="failed", at=ended_at)]
    assert any(text.startswith("job j ") for text in check_liveness.waited(found)) is late


@pytest.mark.parametrize(
    "text", ["a\x1b[31mb", "x\u202ey", "a\x9bb", "ok\n2026-01-01T00:00:00 ERROR forged\n"]
)
def test_what_a_terminal_would_obey_is_found(text: str) -> None:
    (found,) = fleet.unsafe(text)
    assert found.isprintable()


def test_plain_text_and_tables_are_safe() -> None:
    assert fleet.unsafe("a\tb\n\\x1b[31m\n  2026-01-01T00:00:00 ERROR forged, indented\n") == []
