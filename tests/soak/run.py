"""Run one soak, from an empty server to the report."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from psycopg import conninfo, sql

import queue_workflows
from queue_workflows import db
from tests.hostile import folders, operator_commands
from tests.soak import (
    app,
    background,
    check_recovery,
    clock,
    evidence,
    fault_plan,
    faults,
    fleet,
    hostile_load,
    journal,
    load,
    mutants,
    observer,
    process_variants,
    report,
    server,
    stranger_load,
    stream_readers,
    tasks,
    workflows,
)
from tests.support import database, sweeps

QUIET_S = check_recovery.PROMISED_S[fleet.DEFAULT] + fleet.LONG_S + 10.0
"""Nothing moves for so long: it is stuck. The slowest recovery, and the longest handler."""
SETTLE_S = 480.0
"""Most of it for handlers that kill their worker: only a parent sees that, and it takes three."""
CALM = 0.3
"""The last share of the load has no new ones of these."""
MUTANT_SETTLE_S = 60.0
KEPT = (
    "ingest_jobs", "ingest_job_events", "workflow_node_jobs", "workflow_node_events",
    "workflow_runs", "job_parts",
)  # fmt: skip
"""Tables whose rows are kept; the environment variable SOAK_KEEP names the parent folder."""


class Options(NamedTuple):
    """What to run: seconds of load, seed, mean seconds between faults, runs and jobs a second.

    `orders_s`: requests for jobs with keys, limits and retries a second; about two jobs each.
    `hostile_s`: hostile rows and calls a second.
    `older`: the revision of the checkout that one worker runs.
    `twice`: the share of questions that are answered a second time at once.
    """

    seconds: float
    seed: int
    gap_s: float = 2.0
    runs_s: float = 2.0
    jobs_s: float = 2.0
    orders_s: float = 1.2
    mutant: str | None = None
    quiet: bool = False
    twice: float = 0.5
    hostile_s: float = 3.0
    older: str | None = None


def soak(options: Options) -> report.Report:
    """Run it; everything it started has ended when this returns or raises."""
    with server.throw_away() as pg, _own_log(pg.base / "driver.log"), engine(pg.dsn):
        _prepare(options.mutant)
        return _run(options, pg)


@contextmanager
def _own_log(path: Path) -> Generator[None]:
    """Write the log of the engine in this process to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("queue_workflows", "psycopg")]
    kept = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, kept, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)
        handler.close()


@contextmanager
def engine(dsn: str) -> Generator[None]:
    """Let the engine in this process work on the server, past every proxy."""
    settings = {f"QUEUE_WORKFLOWS_{name}": str(value) for name, value in fleet.KNOBS.items()}
    own = database.url({**conninfo.conninfo_to_dict(dsn), "application_name": server.DRIVER})
    with database.environment(QUEUE_WORKFLOWS_DB_URL=own, **settings):
        app.register()
        try:
            yield
        finally:
            db.close_pool()


def _prepare(mutant: str | None) -> None:
    db.bootstrap()
    tasks.limit()
    if mutant is not None:
        mutants.switch_off(mutant)
        with db.connection() as conn:
            mutants.alter(conn, mutant)


def _run(options: Options, pg: server.Server) -> report.Report:
    def say(text: str) -> None:
        if not options.quiet:
            print(text, flush=True)

    time_ = clock.Clock()
    with ExitStack() as stack:
        stack.enter_context(folders.made())
        stalls = stack.enter_context(clock.Stalls())
        stepping = process_variants.steps(pg.base, options.seed)
        older = process_variants.archive(options.older, pg.base) if options.older else None
        differing = process_variants.environments(stepping, older, say)
        pooled = stack.enter_context(process_variants.pooled(pg.dsn, say))
        running = stack.enter_context(
            fleet.Fleet(pg.dsn, pg.base, options.mutant, differing, pooled)
        )
        if stepping is not None:
            stack.enter_context(stepping)
        running.wait_until_up()
        mutant = mutants.together(options.mutant)
        busy = stack.enter_context(
            load.Load(
                options.seed,
                runs_s=options.runs_s,
                jobs_s=options.jobs_s,
                orders_s=options.orders_s,
                twice=options.twice,
                weights=mutant.load,
                kinds=mutant.jobs,
                slow=not options.mutant or not mutant.load.keys().isdisjoint(workflows.SLOW),
            )
        )
        attacking = stack.enter_context(
            hostile_load.Hostile(pg.dsn, options.seed, options.hostile_s, mutant)
        )
        strange = stack.enter_context(
            stranger_load.Strangers(pg.dsn, options.seed, busy.books, mutant.strangers)
        )
        following = fault_plan.plan(options.seed, mutant.gap_s or options.gap_s, mutant.focus)
        began = time.monotonic()
        say(f"{options.seconds:g} s of load and faults, seed {options.seed}")
        struck = faults.Faults(running, pg, following, say)
        reading = stack.enter_context(stream_readers.Readers(busy.books))
        watching = stack.enter_context(observer.Observer(struck.done))
        with struck:
            _pause(options.seconds * (1 - CALM))
            busy.calm()
            _pause(options.seconds * CALM)
            busy.close()
            attacking.close()
            strange.close()
        ended = time.monotonic()
        say("faults have stopped; waiting until everything is over")
        books = busy.books
        left, settled_s = observer.settle(
            lambda: observer.unfinished(
                list(books.runs), list(books.jobs), [run for run, _ in books.never_answered]
            ),
            quiet_s=QUIET_S,
            most_s=MUTANT_SETTLE_S if options.mutant else SETTLE_S,
        )
        shown = operator_commands.read_everything()[0]
        reading.stop(background.END_S)
        reading.read()
        busy.stop(background.END_S)
        attacking.stop(background.END_S)
        strange.stop(background.END_S)
        running.stop()
        with db.statement() as conn:
            sweeps.cancel_orphans(conn)
        hits = [*struck.done, *(faults.Fault("stall", "machine", a, b) for a, b in stalls.found)]
        seen = evidence.gather(
            watching.invariants, lines=journal.read(running.journal), books=books, faults=hits,
            off=struck.off, ended=running.ended, time=time_, began=began, ended_load=ended,
            stuck=left, slow=watching.slow, unserved=watching.unserved, blind=watching.blind,
            served=[
                each._replace(at=time_.at(each.at), last_seen=time_.at(each.last_seen))
                for each in watching.served
            ],
            polls=[time_.at(at) for at in watching.polls],
            hostile=attacking.problems, blocked=strange.blocked, changed=strange.changed,
            locked=strange.locked,
            streams=reading.found,
            shown=[*shown, *folders.touched(), *running.unsafe()],
        )  # fmt: skip
        problems = [*busy.problems, *struck.problems, *strange.problems]
        head = (
            f"{options.seconds:g} s, seed {options.seed}: {len(fleet.SEATS)} seats; {versions()}; "
            f"{check_recovery.knobs()}."
        )
        made = report.make(seen, head=head, settled_s=settled_s)
        made.figures.extend([*attacking.figures(), *strange.figures()])
        if problems:
            made.found["the soak's own trouble"] = problems
        if keep := os.environ.get("SOAK_KEEP"):
            _keep(running, Path(keep), made)
    return made


def versions() -> str:
    """Return what ran: the package, Python, the server, the kernel and the cores."""
    with db.connection() as conn:
        row = conn.execute("SELECT current_setting('server_version') AS version").fetchone()
        assert row is not None
    return (
        f"queue_workflows {queue_workflows.__version__}, Python {platform.python_version()}, "
        f"PostgreSQL {row['version']}, {platform.system()} {platform.release()}, "
        f"{os.cpu_count()} cores"
    )


def _pause(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))


def _keep(running: fleet.Fleet, parent: Path, made: report.Report) -> None:
    """Copy logs, journal, rows and all findings to a new folder in `parent`.

    A later soak with the same `parent` must not overwrite what explains an earlier violation.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
    print(f"logs, journal and rows: {folder}", file=sys.stderr)
    shutil.copytree(running.base, folder, ignore=shutil.ignore_patterns("pg"), dirs_exist_ok=True)
    findings = (f"{name}: {line}\n" for name, found in made.found.items() for line in found)
    (folder / "findings.txt").write_text("".join(findings))
    with db.connection() as conn:
        for table in KEPT:
            query = sql.SQL("SELECT row_to_json(t)::text AS row FROM {} t").format(
                sql.Identifier(table)
            )
            lines = (row["row"] + "\n" for row in conn.execute(query))
            (folder / f"{table}.jsonl").write_text("".join(lines))
