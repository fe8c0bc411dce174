"""The soak's checks that hostile rows do not delay normal work, on constructed evidence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.hostile import fleet
from tests.soak import (
    acknowledgements,
    backlog_evidence,
    check_liveness,
    evidence,
    faults,
    journal,
    observer,
    tasks,
)

LATE = check_liveness.WAIT_S + 1


def seen(claimed_at: float | None, **more: Any) -> evidence.Evidence:
    """A job and a run that were submitted at 100 s, claimed at this time, in a soak until 200 s."""
    known = acknowledgements.Acknowledgements(runs={"r": "chain"}, jobs={"j": "note"})
    common = {"reason": "load", "queue": tasks.NOTES, "key": None, "epoch": 100.0} | more
    common = {"lock_key": None, "seq": 2} | common
    jobs = {"j": {**common, "run_id": None}}
    jobs["n"] = {**jobs["j"], "run_id": "r", "queue": check_liveness.NODES, "reason": None}
    events = {}
    if claimed_at is not None:
        worker = "machine:77:boot:random"
        events = {
            job: [
                evidence.Event(
                    job, 1, "claimed", 1, worker, "machine", row["queue"], claimed_at, claimed_at
                )
            ]
            for job, row in jobs.items()
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


def test_normal_jobs_that_are_claimed_in_time_are_no_finding() -> None:
    assert list(check_liveness.waited(seen(100 + check_liveness.WAIT_S - 1))) == []


@pytest.mark.parametrize("claimed_at", [100 + LATE, None])
def test_normal_jobs_that_wait_too_long_are_found(claimed_at: float | None) -> None:
    found = list(check_liveness.waited(seen(claimed_at)))
    assert [text.split()[:2] for text in found] == [["job", "j"], ["run", "r"]]


def test_a_pause_of_the_queue_excuses_its_jobs() -> None:
    paused = seen(100 + LATE)
    paused.books.pauses.append(acknowledgements.Pause(tasks.NOTES, None, 110.0, 120.0))
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


SLOTS = {
    tasks.NOTES: {"box-b": 1, "box-c": 1, "box-d": 4, "box-q": 1},
    check_liveness.NODES: {"box-a": 1, "box-b": 1, "box-c": 1, "box-d": 1, "box-e": 3},
}
"""The machines of the seats of each queue, and how many jobs the worker of each runs at once."""


def behind_busy_workers() -> evidence.Evidence:
    """A job and a run that waited too long while all workers of their queues ran jobs."""
    found = seen(100 + LATE)
    found.faults = []
    found.lines = []
    found.polls = [80 + 0.5 * n for n in range(240)]
    found.served = [
        observer.Served(at, f"{host}:7:b:r", host, queue, 7, at, is_off=False, running=most)
        for at in found.polls
        for queue, machines in SLOTS.items()
        for host, most in machines.items()
    ]
    return found


def why(found: evidence.Evidence, what: str = "job j ") -> str | None:
    """The finding about the job, or the run, None if there is none."""
    texts = [text for text in check_liveness.waited(found) if text.startswith(what)]
    return texts[0].partition("; ")[2] if texts else None


def changed(
    found: evidence.Evidence, since: float, until: float, host: str = "box-b", **values: Any
) -> None:
    """Change what the workers of one machine did between the two instants."""
    found.served = [
        one._replace(**values) if one.host == host and since <= one.at < until else one
        for one in found.served
    ]


def test_a_job_may_wait_behind_busy_workers() -> None:
    assert why(behind_busy_workers()) is None
    figures = check_liveness.figures(behind_busy_workers())
    assert [figure for _, figure in figures] == [f"1, {LATE:.0f} s"] * 2


def test_nobody_waits_for_ever_however_busy_the_workers_are() -> None:
    assert backlog_evidence.SHARE * check_liveness.WAIT_S < 500
    busy = behind_busy_workers()
    busy.events["j"] = [e._replace(at=600.0, epoch=600.0) for e in busy.events["j"]]
    assert "4 times the bound" in (why(busy) or "")


@pytest.mark.parametrize(("idle_s", "is_found"), [(4.0, False), (6.0, True)])
def test_a_worker_that_is_idle_beside_a_waiting_job_is_found(
    idle_s: float, *, is_found: bool
) -> None:
    idle = behind_busy_workers()
    changed(idle, 120, 120 + idle_s, running=0)
    assert ("workers were idle for 6 s" in (why(idle) or "")) is is_found


RUN = "run r "


def test_a_run_may_wait_behind_busy_workers() -> None:
    assert why(behind_busy_workers(), RUN) is None


@pytest.mark.parametrize("host", SLOTS[check_liveness.NODES])
def test_a_worker_of_nodes_that_is_idle_beside_a_waiting_run_is_found(host: str) -> None:
    idle = behind_busy_workers()
    changed(idle, 120, 126, host=host, running=0)
    assert "workers were idle for 6 s" in (why(idle, RUN) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"queue": "gpu"}, "its queue is gpu"),
        ({"epoch": 100 + LATE}, f"it was inserted after {LATE:.0f} s"),
    ],
    ids=["GPU", "late node"],
)
def test_a_run_whose_first_node_is_no_node_in_line_has_no_excuse(
    changes: dict[str, Any], reason: str
) -> None:
    found = behind_busy_workers()
    found.jobs["n"] |= changes
    assert why(found, RUN) == reason


def test_a_run_without_a_node_and_one_that_is_overtaken_are_found() -> None:
    found = behind_busy_workers()
    node = found.jobs.pop("n")
    assert why(found, RUN) == "no node was inserted"
    found.jobs |= {"n": node, "m": {**node, "seq": 3, "run_id": "s"}}
    found.books.runs["s"] = "chain"
    claim = found.events["n"][0]
    early = claim.at - backlog_evidence.AHEAD_S - 1
    found.events["m"] = [claim._replace(job="m", at=early)]
    assert why(found, RUN) == "a later job was claimed before it"


@pytest.mark.parametrize("what", ["off", "dead", "killed", "started", "fault"])
def test_a_worker_that_cannot_claim_is_not_idle(what: str) -> None:
    """Also one that has just started."""
    idle = behind_busy_workers()
    changed(idle, 120, 130, running=0, is_off=what == "off")
    if what == "dead":
        changed(idle, 115, 300, last_seen=114.0)
        idle.served = [one for one in idle.served if one.host != "box-b" or one.at < 130]
    if what == "killed":
        idle.lines = [journal.Line("start", "k", 1, "box-b:7:b:r", 7, 119.0, "killed")]
    if what == "started":
        changed(idle, 125, 130, running=1)
        changed(idle, 0, 120, worker="box-b:6:b:r")
    if what == "fault":
        idle.faults = [faults.Fault("freeze", "notes-1", 110.0, 121.0, (7,))]
    assert why(idle) is None


@pytest.mark.parametrize(("away_s", "is_found"), [(19.0, False), (22.0, True)])
@pytest.mark.parametrize("is_hit", [False, True])
def test_a_seat_that_stays_without_a_worker_is_found(
    away_s: float, *, is_found: bool, is_hit: bool
) -> None:
    away = behind_busy_workers()
    away.served = [
        one for one in away.served if one.host != "box-b" or one.at < 110 or one.at >= 110 + away_s
    ]
    if is_hit:
        away.faults = [faults.Fault("kill", "notes-1", 109.0, 112.0, (7,))]
    assert ("notes-1 had no worker" in (why(away) or "")) is (is_found and not is_hit)


def test_a_job_that_is_overtaken_is_found() -> None:
    late = behind_busy_workers()
    late.jobs["k"] = {**late.jobs["j"], "seq": 3}
    claim = late.events["j"][0]
    late.events["k"] = [claim._replace(job="k", at=claim.at - backlog_evidence.AHEAD_S + 1)]
    assert why(late) is None
    late.events["k"] = [claim._replace(job="k", at=claim.at - backlog_evidence.AHEAD_S - 1)]
    assert why(late) == "a later job was claimed before it"


def test_a_job_that_takes_every_turn_is_found() -> None:
    late = behind_busy_workers()
    claim = late.events["j"][0]
    late.jobs["k"] = {**late.jobs["j"], "seq": 1, "reason": "hostile"}
    late.events["k"] = [
        claim._replace(job="k", claim=n, at=101.0 + n)
        for n in range(1, backlog_evidence.CLAIMS + 2)
    ]
    assert why(late) == "job k was claimed 11 times meanwhile"
    late.events["k"].pop()
    assert why(late) is None


def test_what_the_observer_did_not_see_excuses_nothing() -> None:
    late = behind_busy_workers()
    late.polls = [at for at in late.polls if not 105 <= at <= 125]
    late.served = [one for one in late.served if not 105 <= one.at <= 125]
    assert why(late) == "the observer did not see enough of it"


@pytest.mark.parametrize(
    "text", ["a\x1b[31mb", "x\u202ey", "a\x9bb", "ok\n2026-01-01T00:00:00 ERROR forged\n"]
)
def test_control_characters_in_output_are_found(text: str) -> None:
    (found,) = fleet.unsafe(text)
    assert found.isprintable()


def test_plain_text_and_tables_are_safe() -> None:
    assert fleet.unsafe("a\tb\n\\x1b[31m\n  2026-01-01T00:00:00 ERROR forged, indented\n") == []
