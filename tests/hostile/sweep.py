"""Write batches of hostile changes to a running fleet, and find the change that broke it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from queue_workflows import config, db, queues, run_store
from tests.hostile import (
    app,
    fleet,
    folders,
    normal_work,
    operator_commands,
    roles,
    row_changes,
    writable_columns,
)
from tests.support import database, wait

Say = Callable[[str], object]
SHOWN = 12
"""Rows of a batch that each command that takes an id is tried on."""
_DUE = """
SELECT 'ingest_jobs' AS what, id FROM ingest_jobs
 WHERE status = 'queued' AND (blocked_reason IS NULL OR blocked_reason = 'set_aside')
   AND queue = ANY (%(queues)s)
UNION ALL
SELECT 'workflow_node_jobs', j.id FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id
 WHERE j.status = 'queued' AND (j.blocked_reason IS NULL OR j.blocked_reason = 'set_aside')
   AND j.queue = 'cpu' AND r.status = 'running'
UNION ALL
SELECT 'workflow_runs', id FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND (available_at IS NULL OR available_at <= now())
UNION ALL
SELECT 'workflow_input_submissions', s.id FROM workflow_input_submissions s
  JOIN workflow_runs r ON r.id = s.run_id
 WHERE s.status IN ('pending', 'processing') AND r.status = 'running'
"""
"""Rows that somebody should be doing: not what waits for a time, a limit or a person."""
_LIVE = "SELECT id FROM {} WHERE status IN ('queued', 'running', 'awaiting_input')"
_PARKED = """
SELECT run_id FROM workflow_node_jobs WHERE status = 'awaiting_input' AND run_id = ANY (%s)
"""


@dataclass
class Found:
    """What a batch did."""

    written: row_changes.Written
    normal_work_s: float = 0.0
    broke: list[str] = field(default_factory=list[str])
    """Normal work that did not end, or processes that died; the row at fault is not known yet."""
    named: list[str] = field(default_factory=list[str])
    """What is wrong with one row, which the text names."""

    @property
    def clean(self) -> bool:
        return not self.broke and not self.named

    def __str__(self) -> str:
        return "\n".join(f"  {each}" for each in [*self.broke, *self.named])


class Arena:
    """A database with the schema, a role with its rights, and the fleet."""

    def __init__(self, dsn: str, purpose: str, role: str, running: fleet.Fleet) -> None:
        self.dsn, self.purpose, self.fleet = dsn, purpose, running
        self._stack = ExitStack()
        connect = psycopg.connect
        self.owner = self._stack.enter_context(connect(dsn, autocommit=True))
        self.hostile = self._stack.enter_context(
            connect(roles.as_role(dsn, role), autocommit=True, prepare_threshold=None)
        )
        for conn in (self.owner, self.hostile):
            conn.execute("SET statement_timeout = '20s'")
        self.tables = writable_columns.read(self.owner, role)
        self.writer = row_changes.Writer(self.owner, self.hostile, self.tables)

    def close(self) -> None:
        """Close the connections."""
        self._stack.close()

    def try_batch(
        self, changes: Sequence[row_changes.Change], *, bound_s: float, look: bool
    ) -> Found:
        """Write the batch; return its effects on other work, and with `look` on the commands."""
        parked = self._park(self.writer.needs(changes))
        written = self.writer.write(changes, parked)
        found = Found(written)
        found.named += [f"the server's own error: {each}" for each in written.odd]
        found.broke, found.normal_work_s = normal_work.NormalWork().wait(
            bound_s, lambda: bool(self.fleet.changed())
        )
        found.broke += self.fleet.changed()
        if not found.broke:
            if look:
                found.named += self._look(written, self._drained(written, bound_s))
                found.broke += self.fleet.changed()
            self.writer.delete(written)
        found.broke += folders.touched()
        return found

    def _park(self, count: int) -> list[str]:
        """Create runs that wait for an answer, to which rows can belong."""
        runs = [run_store.insert_run(workflow_name=row_changes.PARKED)["id"] for _ in range(count)]

        def parked() -> bool:
            return len(self.owner.execute(_PARKED, (runs,)).fetchall()) == count

        # No promise is checked here: while other suites run, the set-up may take long.
        wait.until(parked, timeout_s=60 + count, every_s=0.1)
        return runs

    def _drained(self, written: row_changes.Written, bound_s: float) -> set[tuple[str, str]]:
        """Return hostile rows that are still unfinished after the bound."""
        mine = {(change.table, key.get("id")) for change, key in written.accepted}
        left: set[tuple[str, str]] = set()

        def drained() -> bool:
            nonlocal left
            left = mine & {*self.owner.execute(_DUE, {"queues": [*app.QUEUES]}).fetchall()}
            return not left or bool(self.fleet.changed())

        with suppress(AssertionError):
            wait.until(drained, timeout_s=bound_s, every_s=0.1)
        return left

    def _look(self, written: row_changes.Written, due: set[tuple[str, str]]) -> list[str]:
        """Return the faults of the commands on these rows; cancel and delete the rows."""
        found, printed = operator_commands.read_everything()
        shown = [
            (change, key)
            for table in ("workflow_runs", "ingest_jobs", "workflow_node_jobs")
            for change, key in _sample(written.keys(table))
        ]
        used = Counter(key.get("id") for _, key in written.accepted)
        for change, key in shown:
            # An id that two tables have is ambiguous by right.
            found += operator_commands.read_one(change, key) if used[key] == 1 else []
        by_key = {(change.table, key.get("id")): change for change, key in written.accepted}
        found += [
            f"{by_key[where]}: still to be done, and neither audit nor doctor names it"
            for where in sorted(due)
            if ascii(where[1])[1:-1][:20] not in printed
        ]
        found += self._remove(written, [key for change, key in shown])
        return found + self.fleet.logged()

    def _remove(self, written: row_changes.Written, shown: list[str]) -> list[str]:
        runs, jobs = self._live("workflow_runs"), self._live("ingest_jobs")
        some = row_changes.Written([(c, k) for c, k in written.accepted if k.get("id") in {*shown}])
        found = operator_commands.remove(some, runs, jobs)
        live = self._live("workflow_runs")
        there = self._left(some)
        if there:
            # A job that ran when it was cancelled ends a moment later, and can be deleted then.
            with suppress(AssertionError):
                wait.until(lambda: not self._live("ingest_jobs") & there, timeout_s=10)
            found += operator_commands.remove(some, set(), set())
            there = self._left(some)
        for change, key in some.accepted:
            if change.table == "workflow_runs" and key["id"] in live and _reachable(key["id"]):
                found.append(f"{change}: the run lives after `cancel`")
            if change.table == "ingest_jobs" and key["id"] in there and _reachable(key["id"]):
                found.append(f"{change}: the job is there after `jobs delete`")
        return found

    def _left(self, written: row_changes.Written) -> set[str]:
        """Return those of these jobs that are still there."""
        return self._ids("ingest_jobs") & {key for _, key in written.keys("ingest_jobs")}

    def _live(self, table: str) -> set[str]:
        query = sql.SQL(_LIVE).format(sql.Identifier(table))
        return {row[0] for row in self.owner.execute(query).fetchall()}

    def _ids(self, table: str) -> set[str]:
        query = sql.SQL("SELECT id FROM {}").format(sql.Identifier(table))
        return {row[0] for row in self.owner.execute(query).fetchall()}


def _reachable(key: str) -> bool:
    return 0 < len(key) < operator_commands.LONGEST_ID


def _sample(keys: list[tuple[row_changes.Change, str]]) -> list[tuple[row_changes.Change, str]]:
    """Return at most `SHOWN` of them, evenly spread, with every odd id."""
    odd = [each for each in keys if any(column == "id" for column, _ in each[0].given)]
    step = max(1, len(keys) // SHOWN)
    return [*dict.fromkeys([*odd, *keys[::step]])]


class Ground:
    """A server with a template database; `arena` makes a new database and fleet at a time."""

    def __init__(self, server: database.Database, seats: Sequence[fleet.Seat]) -> None:
        self._server, self._seats = server, seats
        self._template = server.fresh_name()

    def __enter__(self) -> Ground:
        self._stack = ExitStack()
        self._stack.enter_context(folders.made())
        self._server.create_migrated(self._template)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.drop(self._template)
        self._stack.close()

    def alter(self, statements: str) -> None:
        """Change the schema of the arenas to come."""
        with self._inside() as conn:
            conn.execute(statements.encode())

    def _inside(self) -> psycopg.Connection[tuple[object, ...]]:
        dsn = database.url({**self._server.parts, "dbname": self._template})
        return psycopg.connect(dsn, autocommit=True)

    @contextmanager
    def arena(self, purpose: str) -> Generator[Arena]:
        """Yield a new arena; the engine of this process works on its database meanwhile."""
        name = self._server.fresh_name()
        dsn = self._server.create(name, template=self._template)
        with ExitStack() as stack:
            stack.callback(self._server.drop, name)
            stack.enter_context(_engine(dsn))
            role = stack.enter_context(roles.role(dsn, purpose))
            running = stack.enter_context(fleet.running(dsn, self._seats))
            arena = Arena(dsn, purpose, role, running)
            stack.callback(arena.close)
            yield arena


@contextmanager
def _engine(dsn: str) -> Generator[None]:
    """Configure the engine in this process as the app does: its queues, tasks and limits."""
    knobs = {f"QUEUE_WORKFLOWS_{name}": str(value) for name, value in fleet.KNOBS.items()}
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn, **knobs):
        app.setup()
        try:
            queues.limit(app.CALLS, partition_max_running=2)
            yield
        finally:
            db.close_pool()
            config.reset_for_tests()


@dataclass
class Sweep:
    """Tries batch after batch; a batch that breaks something is halved down to the culprit."""

    ground: Ground
    purpose: str
    say: Say
    bound_s: float = fleet.BOUND_S
    ends: float = float("inf")
    """No further batch or half is begun after this monotonic instant."""
    problems: list[str] = field(default_factory=list[str])
    tried: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    _stack: ExitStack = field(default_factory=ExitStack)
    _arena: Arena | None = None

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def arena(self) -> Arena:
        """Return the present arena; a new one after one was broken."""
        if self._arena is None:
            self._arena = self._stack.enter_context(self.ground.arena(self.purpose))
        return self._arena

    def _renew(self) -> None:
        self._stack.close()
        self._arena = None

    def batch(self, changes: Sequence[row_changes.Change]) -> None:
        """Try a batch; what it breaks goes to `problems`, with role, table, column and value."""
        found = self._try(changes, look=True)
        broken = f", BROKEN: {found.broke[0][:200]}" if found.broke else ""
        self.say(
            f"{self.purpose}: {len(changes)} changes, {found.written.refused} refused, normal work "
            f"ended in {found.normal_work_s:.1f} s, {len(found.named)} rows misshown{broken}"
        )
        self.problems += [f"{self.purpose}: {each}" for each in found.named]
        if found.broke:
            self._halve(changes, found)

    def _try(self, changes: Sequence[row_changes.Change], *, look: bool) -> Found:
        found = self.arena.try_batch(changes, bound_s=self.bound_s, look=look)
        self.tried += len(changes)
        self.accepted += len(found.written.accepted)
        self.slowest_s = max(self.slowest_s, found.normal_work_s)
        if found.broke:
            self._renew()
        return found

    def _halve(self, changes: Sequence[row_changes.Change], found: Found) -> None:
        """Report each change that breaks something by itself, else the least that does."""
        if len(changes) == 1:
            self._blame(str(changes[0]), found)
            return
        if time.monotonic() > self.ends:
            self._blame(f"one of {len(changes)} changes, {changes[0]} ... {changes[-1]}", found)
            return
        middle = len(changes) // 2
        broken = False
        for half in (changes[:middle], changes[middle:]):
            again = self._try(half, look=False)
            self.say(f"  half of {len(changes)}: {again.broke[0][:200] if again.broke else 'fine'}")
            if again.broke:
                broken = True
                self._halve(half, again)
        if not broken:
            self._blame(f"{len(changes)} changes together, {changes[0]} ... {changes[-1]}", found)

    def _blame(self, what: str, found: Found) -> None:
        self.problems.append(f"{self.purpose}: {what}\n{found}")
        self.say(f"{self.purpose}: CULPRIT {what}\n{found}")


def batches(changes: Sequence[row_changes.Change], size: int) -> list[list[row_changes.Change]]:
    """Yield the changes in batches of this size, mixed so that neighbours differ in column."""
    count = max(1, -(-len(changes) // size))
    return [[*changes[number::count]] for number in range(count)]


def chosen(
    tables: dict[str, writable_columns.Table], rng: random.Random, *, most: int | None, pairs: int
) -> list[row_changes.Change]:
    """Return all single changes, or a random sample without the heavy ones, and pairs."""
    listed = row_changes.singles(tables)
    if most is not None:
        listed = [change for change in listed if not change.heavy]
        listed = rng.sample(listed, min(most, len(listed)))
    drawn = row_changes.pairs(tables, rng)
    return listed + [change for change, _ in zip(drawn, range(pairs), strict=False)]
