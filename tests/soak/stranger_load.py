"""Keep transactions of strangers open beside the fleet, and be a client with other settings."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import conninfo, rows

from queue_workflows import db, jobs, runs
from queue_workflows.schedule import expression
from tests.hostile import roles
from tests.soak import acknowledgements, app, background, evidence, fleet, step_tasks, tasks

Conn = psycopg.Connection[dict[str, Any]]
EVENTS, KEYS, CONSTRAINTS, ROWS = "events", "keys", "constraints", "rows"
LEAST_S, MOST_S, GAP_S = 1.0, 8.0, 0.5
LOOK_S, VISIT_S = 0.1, 0.7
MANY = 4000
"""Lock keys or partition keys of one transaction: more than there are advisory locks."""
LOOP_S = 1.5
"""Longest wait of a loop: its lock time-out of 0.2 s, and a busy machine."""
COMMIT_S = 2.3
"""The same for the locks of lock keys and partitions, for which a commit waits 1 s in all."""
WAITING = 12
"""Jobs and runs of its own that wait for an event, at most."""
CANCELS = 0.5
TEXTS = ("Gr\u00fc\u00dfe", "na\u00efve", "price in \u20ac", "\u2603 snow", "\u65e5\u672c\u8a9e")
"""Two that LATIN1 has, and three that it has not."""
POISON = "poison: "
"""How the error of a job begins whose workers faults have ended too often."""
_WAITS = """
SELECT key, CASE job_table WHEN 'ingest_jobs' THEN job_id ELSE key END AS id, job_table
  FROM job_steps WHERE kind = 'event' AND state = 'waiting' AND name = %s ORDER BY id LIMIT 50
"""
_SEND = """
INSERT INTO events (name, key, value)
SELECT %s, key, '"stranger"' FROM unnest(%s::text[]) AS k (key)
ON CONFLICT DO NOTHING RETURNING key
"""
_COMING = "SELECT name, next_at FROM schedules WHERE name = ANY (%s) AND next_at IS NOT NULL"
_TAKE_KEYS = """
INSERT INTO ingest_jobs (task_name, queue, idempotency_key)
SELECT 'note', 'notes', key FROM unnest(%s::text[]) AS k (key) ON CONFLICT DO NOTHING
"""
_MANY = """
INSERT INTO ingest_jobs (task_name, queue, {})
SELECT 'note', 'calls', 'stranger ' || n FROM generate_series(1, %s) n
"""
_ROW = (
    "UPDATE workflow_runs SET parcel_id = parcel_id WHERE id = (SELECT id FROM workflow_runs"
    " WHERE status IN ('queued', 'running') ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED)",
    "UPDATE workflow_node_jobs SET queue = queue WHERE id = (SELECT id FROM workflow_node_jobs j"
    " WHERE status IN ('queued', 'running') ORDER BY random() < 0.7 AND status = 'running' DESC,"
    " (SELECT count(*) FROM workflow_node_jobs o WHERE o.status = 'running'"
    " AND o.worker_id = j.worker_id AND o.node_module = 'long') DESC, random()"
    " LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id",
    "UPDATE ingest_jobs SET reason = reason WHERE id = (SELECT id FROM ingest_jobs j"
    " WHERE status IN ('queued', 'running') ORDER BY random() < 0.7 AND status = 'running' DESC,"
    " (SELECT count(*) FROM ingest_jobs o WHERE o.status = 'running'"
    " AND o.worker_id = j.worker_id AND o.task_name = 'nap') DESC, random()"
    " LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id",
)
"""One row; of jobs rather one that runs, beside others that are to be renewed as well."""
_BLOCKED = """
SELECT a.application_name AS seat, a.pid, l.waitstart, left(a.query, 100) AS query,
       extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS waited_s
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE NOT l.granted AND a.application_name = ANY (%s) AND %s = ANY (pg_blocking_pids(l.pid))
"""
_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8 AS t"
_READ = """
SELECT status::text, convert_to(coalesce(result ->> 'text', error, ''), 'UTF8') AS text
  FROM ingest_jobs WHERE id = %s AND status IN ('completed', 'failed')
"""
_SENT = "SELECT args ->> 'text' AS text FROM ingest_jobs WHERE id = %s"


class Strangers(background.BackgroundThread):
    """One open transaction after the other until `close`; events of jobs that wait go on.

    `blocked`: what waited for one and may not. `changed`: texts that did not come back.
    `locked`: the rows of jobs that were locked.
    """

    def __init__(
        self, dsn: str, seed: int, known: acknowledgements.Acknowledgements, kind: str
    ) -> None:
        super().__init__("strangers")
        self.blocked: list[str] = []
        self.changed: list[str] = []
        self.locked: list[evidence.Locked] = []
        self.problems: list[str] = []
        self._rng = random.Random(seed * 5501 + 7)
        self._dsn, self._books = dsn, known
        self._acts = {
            EVENTS: self._send_events, KEYS: self._take_keys,
            CONSTRAINTS: self._lock_many, ROWS: self._lock_row,
        }  # fmt: skip
        self._kinds = [kind] if kind else [*self._acts]
        self._least_s = MOST_S - LEAST_S if kind else LEAST_S
        self._held: Counter[str] = Counter()
        self._waits: dict[tuple[str, int, Any], float] = {}
        """Seat, server process and start of each wait for a stranger, and how long it was."""
        self._unread: dict[str, str] = {}
        """The client's jobs that have not ended, and the text of each."""
        self._read = self._number = 0
        self._open = True
        self._stack = ExitStack()
        self._submitter = ""

    def __enter__(self) -> Strangers:
        role = self._stack.enter_context(roles.role(self._dsn, "submit"))
        self._submitter = roles.as_role(self._dsn, role)
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._stack.close()

    def close(self) -> None:
        """Open no transaction and submit nothing more."""
        self._open = False

    def figures(self) -> list[tuple[str, str]]:
        """Return the counts for the report."""
        longest_s = max(self._waits.values(), default=0.0)
        return [
            *((f"transactions of strangers: {kind}", str(self._held[kind])) for kind in self._acts),
            ("waits for a stranger, longest", f"{len(self._waits)}, {longest_s:.1f} s"),
            ("texts that a LATIN1 client read", str(self._read)),
        ]

    def go(self, stop: threading.Event) -> None:
        while not stop.wait(GAP_S):
            try:
                if self._open:
                    self._hold(stop)
                else:
                    self._end_waits()
            except (db.OperationalError, db.InterfaceError):
                pass  # the server is restarted: each round connects again
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
            now = time.monotonic()
            self.locked = [each._replace(until=min(each.until, now)) for each in self.locked]

    def _connect(self, dsn: str, *, autocommit: bool = False, encoding: str = "UTF8") -> Conn:
        info = conninfo.make_conninfo(dsn, client_encoding=encoding, application_name="stranger")
        conn = psycopg.Connection[dict[str, Any]].connect(
            info, autocommit=autocommit, connect_timeout=5, row_factory=rows.dict_row
        )
        conn.execute("SET lock_timeout = '2s'")
        conn.execute("SET statement_timeout = '15s'")
        if not autocommit:
            conn.commit()
        return conn

    def _client(self) -> Conn:
        conn = self._connect(self._submitter, autocommit=True, encoding="LATIN1")
        conn.execute("SET DateStyle = 'German'")
        conn.execute("SET TimeZone = 'Asia/Kathmandu'")
        return conn

    def _hold(self, stop: threading.Event) -> None:
        """Open a transaction, keep it, and look who waits for it."""
        kind = self._rng.choice(self._kinds)
        dsn = self._dsn if kind == ROWS else self._submitter
        with (
            closing(self._connect(dsn)) as conn,
            closing(self._connect(self._dsn, autocommit=True)) as watcher,
            closing(self._client()) as client,
        ):
            self._submit_waits(client)
            told = self._acts[kind](conn)
            self._held[kind] += 1
            now = time.monotonic()
            ends, visits_at = now + self._rng.uniform(self._least_s, MOST_S), now
            cancels = kind == EVENTS and self._rng.random() < CANCELS
            while (now := time.monotonic()) < ends and not stop.wait(LOOK_S):
                self._look(watcher, conn.info.backend_pid, kind)
                if now >= visits_at:
                    visits_at = now + VISIT_S
                    self._visit(client, kind)
                if cancels and ends - now < LEAST_S:
                    cancels = False
                    self._cancel(watcher, told)
            self._end(conn, kind, told)

    def _end(self, conn: Conn, kind: str, told: dict[str, str]) -> None:
        """Commit or roll back; what is taken back is nothing that anybody may expect.

        Keys of schedules and thousands of jobs are always taken back, so that their schedules fire
        and nobody has to run them.
        """
        if kind in (KEYS, CONSTRAINTS) or self._rng.random() < 0.5:
            conn.rollback()
            return
        try:
            conn.commit()
        except db.Error:
            self._books.perhaps_sent |= {*told.values()}
            raise
        for each in told.values():
            self._books.events[each].append("stranger")

    # --- what it does in the transaction: each returns the events that it inserted ---

    def _send_events(self, conn: Conn) -> dict[str, str]:
        """Insert events of jobs that wait; return key → what `books` calls the job or run."""
        waiting = {row["key"]: row["id"] for row in conn.execute(_WAITS, (step_tasks.EVENT,))}
        found = conn.execute(_SEND, (step_tasks.EVENT, [*waiting])).fetchall()
        return {row["key"]: waiting[row["key"]] for row in found}

    def _take_keys(self, conn: Conn) -> dict[str, str]:
        every = timedelta(seconds=app.HELD_EVERY_S)
        found = conn.execute(_COMING, ([*app.held_names()],)).fetchall()
        instants = [(row["name"], row["next_at"] + n * every) for row in found for n in range(2)]
        keys = [f"{name} {expression.as_utc(at).isoformat()}" for name, at in instants]
        conn.execute(_TAKE_KEYS, (keys,))
        return {}

    def _lock_many(self, conn: Conn) -> dict[str, str]:
        column = self._rng.choice(["lock_key", "partition_key"])
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        conn.execute(_MANY.format(column).encode(), (MANY,))
        return {}

    def _lock_row(self, conn: Conn) -> dict[str, str]:
        found = conn.execute(self._rng.choice(_ROW).encode())
        now = time.monotonic()
        rows_ = found.fetchall() if found.description else ()
        self.locked += [evidence.Locked(row["id"], now, float("inf")) for row in rows_]
        return {}

    # --- what others see of it ---

    def _look(self, watcher: Conn, pid: int, kind: str) -> None:
        seats = [seat.name for seat in fleet.SEATS]
        for row in watcher.execute(_BLOCKED, (seats, pid)).fetchall():
            which = (row["seat"], row["pid"], row["waitstart"])
            before, waited_s = self._waits.get(which, -1.0), row["waited_s"] or 0.0
            self._waits[which] = waited_s
            most_s = limit_s(kind)
            if before <= most_s < waited_s:
                self.blocked.append(
                    f"{row['seat']} waits for a stranger's {kind} for {waited_s:.2f} s:"
                    f" {' '.join(row['query'].split())}"
                )

    def _cancel(self, watcher: Conn, told: dict[str, str]) -> None:
        """Cancel a run whose event is in the open transaction."""
        found = [each for each in told.values() if each in self._books.runs]
        if not found:
            return
        run_id = self._rng.choice(found)
        self._books.perhaps_cancelled.add(run_id)
        try:
            done = runs.cancel(run_id) is not None
        except psycopg.errors.LockNotAvailable as error:
            self.blocked.append(f"the cancel of run {run_id}: {error}")
            return
        if done and (row := watcher.execute(_NOW).fetchone()) is not None:
            self._books.cancelled[run_id] = row["t"]

    def _end_waits(self) -> None:
        """Send the events that jobs still wait for, and read what the client has not read."""
        with (
            closing(self._connect(self._submitter, autocommit=True)) as conn,
            closing(self._client()) as client,
        ):
            waiting = {row["key"]: row["id"] for row in conn.execute(_WAITS, (step_tasks.EVENT,))}
            try:
                sent = conn.execute(_SEND, (step_tasks.EVENT, [*waiting])).fetchall()
            except db.Error:
                self._books.perhaps_sent |= {*waiting.values()}
                raise
            for row in sent:
                self._books.events[waiting[row["key"]]].append("stranger")
            self._read_texts(client)

    # --- the client with other settings ---

    def _submit_waits(self, client: Conn) -> None:
        """Submit a run and a job that wait for an event, if few do."""
        waiting = client.execute(_WAITS, (step_tasks.EVENT,)).fetchall()
        if len(waiting) >= WAITING:
            return
        self._number += 1
        run_id = f"stranger-{self._rng.getrandbits(64):x}"
        client.execute(
            "INSERT INTO workflow_runs (id, workflow_name) VALUES (%s, %s)",
            (run_id, step_tasks.LISTENS),
        )
        self._books.runs[run_id] = step_tasks.LISTENS
        number = f"stranger {self._number}"
        self._submit(client, "waits", {"number": number})

    def _submit(self, client: Conn, task: str, args: dict[str, Any]) -> str:
        job_id = jobs.enqueue(
            task_name=task, queue=tasks.NOTES, reason="load", args=args, conn=client
        )
        self._books.jobs[job_id] = task
        return str(job_id)

    def _visit(self, client: Conn, kind: str) -> None:
        """Submit a job with a text, and read the texts of those that are over."""
        text = self._rng.choice(TEXTS)
        task = self._rng.choice(["echo", "complains"])
        try:
            self._unread[self._submit(client, task, {"text": text})] = text
        except psycopg.errors.LockNotAvailable as error:
            self.blocked.append(f"a submit beside a stranger's {kind}: {error}")
        self._read_texts(client)

    def _read_texts(self, client: Conn) -> None:
        for job_id, text in [*self._unread.items()]:
            row = client.execute(_READ, (job_id,)).fetchone()
            if row is None:
                continue
            got = bytes(row["text"]).decode()
            wanted = text if row["status"] == "completed" else f"ValueError: {text}"
            if got != wanted and not got.startswith(POISON):
                self.changed.append(f"job {job_id}: {row['status']} with {got!r}, not {wanted!r}")
            if _has(text):
                sent = client.execute(_SENT, (job_id,)).fetchone()
                if sent != {"text": text}:
                    self.changed.append(f"job {job_id}: its args are {sent}, not {text!r}")
            del self._unread[job_id]
            self._read += 1


def _has(text: str) -> bool:
    """Return whether LATIN1 has all characters of a text."""
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def limit_s(kind: str) -> float:
    """Return how long a session of the fleet may wait for a stranger's transaction.

    Whoever sends an event has written its own row alone, and nobody waits for it.
    """
    if kind == EVENTS:
        return 0.0
    if kind == CONSTRAINTS:
        return COMMIT_S
    return LOOP_S
