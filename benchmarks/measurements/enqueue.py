"""Measure enqueues, one commit each and in bulk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import psycopg

from benchmarks import baseline, results
from benchmarks.bench import Bench
from queue_workflows import db, jobs

ABOUT = """One at a time: `jobs.enqueue`, each job its own commit, in blocks that take turns.
On a kept connection in autocommit (`conn=`; bare: one INSERT in autocommit), on a kept connection
with `commit()` after each (bare: the same with its INSERT), and without `conn=`, through the
engine's pool, which tests a connection before it lends it (bare: the INSERT in autocommit). In
bulk: 10,000 jobs with arguments through one `jobs.enqueue_many` and one commit; bare is one
`INSERT … SELECT unnest` of the same texts into its plain table. Ours also writes the row's other
columns, validates the payload, fires the wake-up trigger and returns the ids."""
BULK = 10_000
BLOCK = 25
_VALUES = ("noop", "load", "tick", 100)
_COPY = "COPY bare_jobs (task_name, queue, reason, priority, args) FROM STDIN"
Body = Callable[[int], None]


def _ours(conn: db.Connection | None, *, commit: bool) -> Body:
    def body(number: int) -> None:
        jobs.enqueue(task_name="noop", queue="load", args={"number": number}, conn=conn)
        if conn is not None and commit:
            conn.commit()

    return body


def _bare(conn: baseline.Connection, *, commit: bool) -> Body:
    def body(number: int) -> None:
        conn.execute(baseline.ENQUEUE, (*_VALUES, json.dumps({"number": number})), prepare=True)
        if commit:
            conn.commit()

    return body


def _seconds(body: Body, count: int) -> float:
    begun = time.perf_counter()
    for number in range(count):
        body(number)
    return time.perf_counter() - begun


def _round(bodies: dict[str, Body], turns: int) -> dict[str, float]:
    """Return rates of functions that alternate in blocks of 25, so that a disturbance hits all."""
    spent = dict.fromkeys(bodies, 0.0)
    for _ in range(turns):
        for name, body in bodies.items():
            spent[name] += _seconds(body, BLOCK)
    return {name: turns * BLOCK / seconds for name, seconds in spent.items()}


def _empty(conn: baseline.Connection) -> None:
    conn.execute("TRUNCATE bare_jobs, ingest_jobs")


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield three rows one by one, two in bulk."""
    with bench.server.database("enqueue") as dsn, baseline.connect(dsn) as conn:
        yield from _single(bench, dsn, conn)
        yield from _bulk(bench, conn)


def _single(
    bench: Bench, dsn: str, conn: baseline.Connection
) -> Iterator[results.Row | results.PeerRow]:
    with baseline.connect(dsn) as own, db.connect() as kept, db.connect() as kept_commit:
        own.autocommit = kept_commit.autocommit = False
        bodies = {
            "bare": _bare(conn, commit=False),
            "kept": _ours(kept, commit=False),
            "bare commit": _bare(own, commit=True),
            "kept commit": _ours(kept_commit, commit=True),
            "pool": _ours(None, commit=False),
        }
        rates: dict[str, list[float]] = {name: [] for name in bodies}
        for body in bodies.values():
            _seconds(body, 30)
        for _ in range(bench.pick(7, 3)):
            _empty(conn)
            for name, rate in _round(bodies, bench.pick(20, 10)).items():
                rates[name].append(rate)
    named = (
        ("kept", "bare", "kept connection, autocommit"),
        ("kept commit", "bare commit", "kept connection, commit()"),
        ("pool", "bare", "through the pool"),
    )
    for ours, bare, text in named:
        yield _row(f"enqueue one by one, {text}", rates[ours], rates[bare], 0.8)
    ours_rate = results.middle(rates["kept"])
    for peer in bench.peers("enqueue"):
        value = peer.call("enqueue", bench.pick(2000, 500))
        yield results.PeerRow("enqueue one by one", peer.title, value, "/s", ours_rate)


def _row(
    name: str, ours: list[float], bare: list[float], limit: float, note: str = ""
) -> results.Row:
    return results.Row(
        name,
        results.middle(ours),
        "/s",
        results.middle(bare),
        results.paired(ours, bare),
        results.at_least(limit),
        note,
    )


def _bulk(bench: Bench, conn: baseline.Connection) -> Iterator[results.Row | results.PeerRow]:
    args = [{"number": number} for number in range(BULK)]
    rates: dict[str, list[float]] = {"bare": [], "ours": [], "copy": []}
    with db.connect() as kept:
        for _ in range(bench.pick(6, 3)):
            _empty(conn)
            begun = time.perf_counter()
            conn.execute(baseline.ENQUEUE_MANY, (*_VALUES, [json.dumps(one) for one in args]))
            rates["bare"].append(BULK / (time.perf_counter() - begun))
            begun = time.perf_counter()
            jobs.enqueue_many(task_name="noop", queue="load", args=args, conn=kept)
            rates["ours"].append(BULK / (time.perf_counter() - begun))
            begun = time.perf_counter()
            _copy(conn, args)
            rates["copy"].append(BULK / (time.perf_counter() - begun))
    note = f"COPY into the bare table: {results.number(results.middle(rates['copy']))} /s"
    yield _row(f"enqueue {BULK:,} in bulk", rates["ours"], rates["bare"], 0.7, note)
    for peer in bench.peers("bulk"):
        value = peer.call("bulk", BULK)
        yield results.PeerRow(
            f"enqueue {BULK:,} in bulk", peer.title, value, "/s", results.middle(rates["ours"])
        )


def _copy(conn: psycopg.Connection[dict[str, object]], args: list[dict[str, int]]) -> None:
    with conn.cursor().copy(_COPY) as copy:
        for one in args:
            copy.write_row((*_VALUES, json.dumps(one)))
