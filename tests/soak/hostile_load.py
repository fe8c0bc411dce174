"""Submit hostile rows, and call every function as a role without rights; both seeded."""

from __future__ import annotations

import random
import re
import threading
from contextlib import ExitStack, suppress

import psycopg
from psycopg import sql

from queue_workflows import db
from tests.hostile import function_calls, roles, row_changes, writable_columns
from tests.soak import background, fault_plan, tasks, workflows
from tests.soak.mutant import Mutant

PURPOSE = "submit"
ASKS = "asks"
KNOWN: row_changes.Known = {
    "workflow_runs": {"workflow_name": ("chain", ASKS, workflows.WRITES)},
    "ingest_jobs": {
        "queue": (tasks.NOTES, tasks.FEEDS, tasks.CALLS),
        "task_name": ("note", "hopeless", "fetch", "parse"),
        "partition_key": (None, "red"),
        "args": ("{}",),
        "reason": ("hostile",),
    },
    "workflow_input_submissions": {"node_id": ("ask",), "value": ('"l"',)},
}
CALLS = 0.25
PAIRS = 0.3
LOCKED = ": 55P03 "
"""A stranger's transaction keeps the row longer than the time-out of the session here."""
_WAITING = sql.SQL(
    "SELECT run_id FROM workflow_node_jobs j WHERE status = 'awaiting_input' AND run_id = ANY (%s)"
    " AND NOT EXISTS (SELECT FROM workflow_input_submissions s WHERE s.run_id = j.run_id)"
)
_OWN_RUN = sql.SQL("INSERT INTO workflow_runs (id, workflow_name) VALUES (%s, %s)")


class Hostile(background.BackgroundThread):
    """Writes `rate_s` hostile rows and calls a second until `close`, whatever comes back."""

    def __init__(self, dsn: str, seed: int, rate_s: float, mutant: Mutant) -> None:
        super().__init__("hostile")
        self.problems: list[str] = []
        self.written = self.refused = self.called = 0
        self._rng = random.Random(seed * 6133 + 5)
        self._dsn, self._rate_s = dsn, rate_s
        self._columns, self._grants = mutant.hostile, mutant.grants
        self._names = re.compile(mutant.values)
        self._calls = CALLS if mutant.calls is None else mutant.calls
        self._stack = ExitStack()
        self._roles: dict[str | None, str] = {}
        self._conns: dict[str, psycopg.Connection[tuple[object, ...]]] = {}
        self._open = True
        self._runs: list[str] = []

    def __enter__(self) -> Hostile:
        for purpose in (PURPOSE, None):
            self._roles[purpose] = self._stack.enter_context(roles.role(self._dsn, purpose))
        with psycopg.connect(self._dsn, autocommit=True) as owner:
            if self._grants:
                role = sql.Identifier(self._roles[PURPOSE])
                owner.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(self._grants), role))  # type: ignore[arg-type]
            self._tables = writable_columns.read(owner, self._roles[PURPOSE])
            self._functions = function_calls.read(owner)
        self._singles = [each for each in row_changes.singles(self._tables) if not each.heavy]
        self._focus = [
            each
            for each in self._singles
            if each.given[0][0] in self._columns and self._names.search(each.given[0][1].name)
        ]
        self._pairs = row_changes.pairs(self._tables, self._rng)
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        for conn in self._conns.values():
            conn.close()
        self._stack.close()

    def close(self) -> None:
        """Write and call nothing more."""
        self._open = False

    def figures(self) -> list[tuple[str, str]]:
        """Return the counts for the report."""
        return [
            ("hostile rows taken", str(self.written)),
            ("hostile rows refused", str(self.refused)),
            ("functions called by roles that may not", str(self.called)),
        ]

    def go(self, stop: threading.Event) -> None:
        while not stop.wait(self._rng.expovariate(self._rate_s)):
            if not self._open:
                continue
            # The server is restarted and connections are cut meanwhile; both connect again.
            with suppress(db.Error):
                if self._rng.random() < self._calls:
                    self._call()
                else:
                    self._write()

    def _conn(self, purpose: str | None) -> psycopg.Connection[tuple[object, ...]]:
        role = self._roles[purpose]
        conn = self._conns.get(role)
        if conn is None or conn.closed:
            dsn = roles.as_role(self._dsn, role)
            conn = psycopg.connect(dsn, autocommit=True, connect_timeout=5)
            conn.execute(f"SET statement_timeout = {function_calls.LONGEST_S * 1000:.0f}".encode())
            conn.execute("SET lock_timeout = '2s'")
            self._conns[role] = conn
        return conn

    def _write(self) -> None:
        conn = self._conn(PURPOSE)
        change = self._drawn()
        writer = row_changes.Writer(conn, conn, self._tables, KNOWN)
        parked: list[str] = []
        if change.table == "workflow_input_submissions":
            parked = self._parked(conn)
            if not parked:
                return
        written = writer.write([change], parked)
        self.written += len(written.accepted)
        self.refused += written.refused
        if conn.info.status == conn.info.status.OK:
            self.problems += [each for each in written.odd if LOCKED not in each]

    def _drawn(self) -> row_changes.Change:
        if self._focus and self._rng.random() < fault_plan.FOCUS:
            return self._rng.choice(self._focus)
        return next(self._pairs) if self._rng.random() < PAIRS else self._rng.choice(self._singles)

    def _parked(self, conn: psycopg.Connection[tuple[object, ...]]) -> list[str]:
        """Return one of its own runs that waits for an answer, and begin the next one."""
        waiting = conn.execute(_WAITING, (self._runs[-50:],)).fetchall()
        run_id = f"hostile-{self._rng.getrandbits(64):x}"
        conn.execute(_OWN_RUN, (run_id, ASKS))
        self._runs.append(run_id)
        return [str(row[0]) for row in waiting[:1]]

    def _call(self) -> None:
        purpose = self._rng.choice((PURPOSE, None))
        function = self._rng.choice(self._functions)
        given = function_calls.arguments(function, self._rng)
        problem = function_calls.call(self._conn(purpose), function, given, nobody=purpose is None)
        self.called += 1
        if problem is not None:
            self.problems.append(f"{purpose or 'a role without rights'}: {problem}")
