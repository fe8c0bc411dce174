"""The soak's checks beside strangers' transactions, on constructed evidence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.soak import acknowledgements, app, check_fires, check_growth, evidence, stranger_load
from tests.soak.stranger_load import CONSTRAINTS, EVENTS, KEYS, ROWS

SINCE, UNTIL = 1000, 1100


def seen(**more: Any) -> evidence.Evidence:
    none: dict[str, Any] = dict.fromkeys(
        ("lines", "off", "ended", "stuck", "invariants", "slow"), ()
    )
    known: dict[str, Any] = {
        "jobs": {}, "runs": {}, "events": {}, "fires": [],
        "books": acknowledgements.Acknowledgements(),
        # Everybody was hit: no other schedule has to have fired.
        "faults": [SimpleNamespace(at=0, until=2 * UNTIL, pids=(), seat="server", kind="restart")],
        "time": cast("Any", SimpleNamespace(at=lambda epoch: epoch, offset=0.0)),
        "began": float(SINCE), "ended_load": float(UNTIL),
    }  # fmt: skip
    return evidence.Evidence(**none | known | more)


def fires(*left_out: int, until: int = UNTIL) -> list[dict[str, Any]]:
    return [
        {"name": name, "at": float(at), "job_id": "j", "there": True}
        for name in app.held_names()
        for at in range(SINCE, until, app.HELD_EVERY_S)
        if at not in left_out
    ]


def test_an_instant_whose_key_was_taken_has_to_fire_later() -> None:
    assert not list(check_fires.fires(seen(fires=fires())))
    found = list(check_fires.fires(seen(fires=fires(SINCE + 50))))
    assert found == [
        f"{name} did not fire between {SINCE + 45} and {SINCE + 55}" for name in app.held_names()
    ]
    late = list(check_fires.fires(seen(fires=fires(until=UNTIL - 70))))
    assert len(late) == app.HELD
    assert len(list(check_fires.fires(seen()))) == app.HELD


@pytest.mark.parametrize(
    ("accepted", "wrong"), [(["stranger"], 0), (["first", "stranger"], 2), ([], 1)]
)
def test_a_node_gets_the_event_that_was_accepted_for_its_run(
    accepted: list[str], wrong: int
) -> None:
    job = {"what": "listens", "status": "completed", "run_id": "r", "result": {"got": "stranger"}}
    books = acknowledgements.Acknowledgements()
    books.events["r"] = accepted
    assert len(list(check_growth.waited(seen(jobs={"n": job}, books=books)))) == wrong
    books.perhaps_sent.add("r")
    assert len(list(check_growth.waited(seen(jobs={"n": job}, books=books)))) == max(0, wrong - 1)


@pytest.mark.parametrize(
    ("kind", "most_s"), [(EVENTS, 0.0), (KEYS, 1.5), (CONSTRAINTS, 2.3), (ROWS, 1.5)]
)
def test_nobody_waits_for_a_sender_and_no_loop_for_long(kind: str, most_s: float) -> None:
    assert stranger_load.limit_s(kind) == most_s
