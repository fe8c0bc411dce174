"""`queue-workflows connect` names the first broken step, on real servers and sockets."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import queue_workflows
from queue_workflows import config, db, node_queue, run_store
from queue_workflows import jobs as jobs_api
from tests.support import catalog, commands, console, database, faketime, findings, rights
from tests.support.commands import Commands
from tests.support.findings import ERROR, OK, WARNING, Finding
from tests.support.proxy import Proxy
from tests.support.tcp_server import Server

CANARY = "canary77"
BASE = "fleet_test"
STEPS = (
    "name", "port", "tls", "login", "database", "server", "schema", "rights", "clock", "listen",
    "round trip",
)  # fmt: skip


def steps(dsn: str, purpose: str = "work", timeout_s: float = 5.0) -> list[Finding]:
    return findings.of_connect(dsn, "--for", purpose, "--timeout", str(timeout_s))


def failed(dsn: str, purpose: str = "work", timeout_s: float = 5.0) -> Finding:
    """The one step that fails, which is the last; those before it are ok."""
    *before, last = steps(dsn, purpose, timeout_s)
    assert [step for step in before if step.level == ERROR] == []
    assert last.level == ERROR
    assert last.remedy
    assert CANARY not in str([*before, last])
    return last


def passed(dsn: str, purpose: str = "work") -> dict[str, Finding]:
    """All steps; none fails."""
    found = {step.check: step for step in steps(dsn, purpose)}
    assert ERROR not in {step.level for step in found.values()}, found
    return found


@pytest.fixture(scope="module")
def template(reachable: Server) -> Generator[str]:
    """The name of a database with the schema, owned by `boss`."""
    name = f"{BASE}_template"
    reachable.sql(f"CREATE ROLE boss LOGIN PASSWORD '{CANARY}'")
    reachable.sql(f"CREATE DATABASE {name} OWNER boss")
    inside = f"postgresql://boss@/{name}?{reachable.admin.partition('?')[2]}"
    with database.environment(QUEUE_WORKFLOWS_DB_URL=inside):
        db.bootstrap()
        db.close_pool()
    yield name
    reachable.sql(f"DROP DATABASE {name} WITH (FORCE)", "DROP ROLE boss")


@pytest.fixture
def home(reachable: Server, template: str, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """A database with the schema, whose owner reaches it by TCP and password; the DSN."""
    reachable.sql(f"CREATE DATABASE {BASE} TEMPLATE {template} OWNER boss")
    dsn = reachable.dsn("boss", CANARY, BASE)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    yield dsn
    db.close_pool()
    reachable.sql(f"DROP DATABASE {BASE} WITH (FORCE)")


@pytest.fixture
def role(reachable: Server, home: str) -> Generator[Callable[..., str]]:
    """Makes the role `guest` with these grants; its DSN."""

    def make(*grants: str) -> str:
        reachable.sql(f"CREATE ROLE guest LOGIN PASSWORD '{CANARY}'")
        reachable.sql(*grants, name=BASE)
        return reachable.dsn("guest", CANARY, BASE)

    yield make
    reachable.sql("DROP OWNED BY guest CASCADE", name=BASE)
    reachable.sql("DROP ROLE guest")


# --- all is well -------------------------------------------------------------------------------


def test_a_way_without_fault_is_all_ok_in_order(home: str) -> None:
    found = passed(home)
    assert tuple(found) == STEPS
    assert {step.level for step in found.values()} == {OK}
    assert not [step for step in found.values() if step.remedy]
    assert found["login"].text == "as boss"
    assert "ms" in found["round trip"].text


def test_a_unix_socket_has_no_tls_to_check(db: Any, dsn: str) -> None:
    assert tuple(passed(dsn)) == tuple(step for step in STEPS if step != "tls")


# --- the way there -----------------------------------------------------------------------------


def test_a_name_that_nobody_knows(home: str) -> None:
    step = failed(home.replace("127.0.0.1", "db.invalid"))
    assert step.check == "name"
    assert "db.invalid has no address here" in step.text
    assert "getent hosts db.invalid" in step.remedy


def test_a_folder_of_sockets_that_is_not_there() -> None:
    assert failed("postgresql://u@/x?host=/nowhere/at/all").check == "name"


def test_a_closed_port(home: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        step = failed(f"postgresql://u:{CANARY}@127.0.0.1:{port}/x")
    assert step.check == "port"
    assert f"127.0.0.1:{port} refuses" in step.text
    assert "listen_addresses" in step.remedy


def test_a_socket_without_server(tmp_path: Any) -> None:
    step = failed(f"postgresql://u@/x?host={tmp_path}&port=5")
    assert (step.check, "start the server" in step.remedy) == ("port", True)


@contextlib.contextmanager
def black_hole() -> Generator[int]:
    """A port whose queue is full: the kernel drops connection attempts, as a firewall does."""
    with ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4):
            knock = stack.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(hole.getsockname())
        yield hole.getsockname()[1]


def test_a_firewall_that_drops_everything() -> None:
    with black_hole() as port:
        step = failed(f"postgresql://u:{CANARY}@127.0.0.1:{port}/x", timeout_s=0.3)
    assert step.check == "port"
    assert "does not answer within 0.3 s" in step.text
    assert "firewall" in step.remedy


@pytest.mark.parametrize("code", ["ENETUNREACH", "EHOSTUNREACH"])
def test_a_network_without_a_way_there(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(getattr(errno, code), "as the kernel says")

    monkeypatch.setattr(socket, "create_connection", refuse)
    step = failed(f"postgresql://u:{CANARY}@192.0.2.1:5432/x")
    assert step.check == "port"
    assert step.text == "no route to 192.0.2.1:5432 (as the kernel says)"
    assert "one network" in step.remedy


@contextlib.contextmanager
def listener(reply: bytes | None) -> Generator[int]:
    """A server that answers everything with this; None: it accepts connections, sends nothing."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            kept: list[socket.socket] = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    conn, _ = server.accept()
                    kept.append(conn)
                    if reply is not None:
                        conn.recv(8)
                        conn.sendall(reply)
            for conn in kept:
                conn.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (None, "accepts connections and sends nothing for 0.3 s"),
        (b"HTTP/1.1 400 Bad Request\r\n", "is not PostgreSQL"),
        (b"", "sends nothing"),
    ],
)
def test_something_else_that_listens_there(reply: bytes | None, text: str) -> None:
    with listener(reply) as port:
        step = failed(f"postgresql://u:{CANARY}@127.0.0.1:{port}/x", timeout_s=0.3)
    assert step.check == "tls"
    assert text in step.text


def test_tls_that_is_demanded_and_not_offered(home: str) -> None:
    step = failed(f"{home}?sslmode=require")
    assert step.check == "tls"
    assert "offers none" in step.text
    assert "ssl = on" in step.remedy


def test_of_several_servers_one_that_answers_is_enough(home: str, reachable: Server) -> None:
    both = f"postgresql://boss:{CANARY}@127.0.0.1:1,127.0.0.1:{reachable.port}/{BASE}"
    found = passed(both)
    assert found["port"].level == WARNING
    assert "127.0.0.1:1 refuses" in found["port"].text
    assert f"127.0.0.1:{reachable.port} answers" in found["port"].text
    assert failed("postgresql://u@127.0.0.1:1,127.0.0.1:2/x").check == "port"


# --- login and database ------------------------------------------------------------------------


def test_a_wrong_password(home: str) -> None:
    step = failed(home.replace(CANARY, "wrong"))
    assert step.check == "login"
    assert 'password authentication failed for user "boss"' in step.text
    assert "ALTER ROLE boss PASSWORD" in step.remedy


def test_no_password(home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    step = failed(home.replace(f":{CANARY}", ""))
    assert (step.check, "PGPASSWORD" in step.remedy) == ("login", True)


def test_an_address_that_no_rule_lets_in(reachable: Server, template: str) -> None:
    step = failed(reachable.dsn("boss", CANARY, "postgres"))
    assert step.check == "login"
    assert "no pg_hba.conf entry" in step.text
    assert "`host postgres boss" in step.remedy
    assert "pg_reload_conf" in step.remedy


def test_a_role_that_may_not_log_in(reachable: Server, home: str) -> None:
    reachable.sql(f"CREATE ROLE mute PASSWORD '{CANARY}'")
    try:
        step = failed(reachable.dsn("mute", CANARY, BASE))
    finally:
        reachable.sql("DROP ROLE mute")
    assert step.check == "login"
    assert "not permitted to log in" in step.text


def test_a_database_that_is_missing(reachable: Server, home: str) -> None:
    *_, login, step = steps(reachable.dsn("boss", CANARY, "missing_test"))
    assert (login.check, login.level) == ("login", OK)
    assert (step.check, step.level) == ("database", ERROR)
    assert step.remedy == "as a superuser there: CREATE DATABASE missing_test OWNER boss"


def test_a_database_that_this_role_may_not_enter(reachable: Server, home: str, role: Any) -> None:
    dsn = role(f"REVOKE CONNECT ON DATABASE {BASE} FROM PUBLIC")
    step = failed(dsn)
    assert step.check == "database"
    assert step.remedy == f"GRANT CONNECT ON DATABASE {BASE} TO guest"


def test_a_read_only_server(reachable: Server, home: str) -> None:
    reachable.sql(f"ALTER DATABASE {BASE} SET default_transaction_read_only = on")
    assert failed(home).check == "server"


# --- schema and rights -------------------------------------------------------------------------


def test_no_schema(reachable: Server, home: str, role: Any) -> None:
    reachable.sql(
        "DROP SCHEMA public CASCADE", "CREATE SCHEMA public AUTHORIZATION boss", name=BASE
    )
    step = failed(home)
    assert (step.check, step.text) == ("schema", "there is none")
    assert step.remedy == "run `queue-workflows migrate`, or start queue-orchestrator"
    assert passed(home, "migrate")["schema"].text == "none yet, and this role may create it"
    step = failed(role("GRANT USAGE ON SCHEMA public TO guest"), "migrate")
    assert "GRANT CREATE ON SCHEMA public" in step.remedy


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ("DELETE FROM queue_schema_version WHERE version > 12", ERROR, "at version 12"),
        ("INSERT INTO queue_schema_version VALUES (9999)", WARNING, "may work on it"),
        (
            "INSERT INTO queue_schema_version (version, compatible_with) VALUES (9999, 9998)",
            ERROR,
            "needs code that knows version 9998",
        ),
    ],
)
def test_a_schema_of_another_version(
    reachable: Server, home: str, change: str, level: str, text: str
) -> None:
    reachable.sql(change, name=BASE)
    step = next(step for step in steps(home) if step.check == "schema")
    assert (step.level, text in step.text) == (level, True)
    assert step.remedy


def test_a_schema_that_this_role_does_not_see(reachable: Server, home: str, role: Any) -> None:
    step = failed(role("REVOKE ALL ON SCHEMA public FROM PUBLIC"))
    assert step.check == "schema"
    assert "it is in schema public" in step.text
    assert step.remedy.startswith("GRANT USAGE ON SCHEMA public TO guest")
    step = failed(f"{home}?options=-c%20search_path%3Delsewhere")
    assert "search_path" in step.remedy


def test_a_role_without_rights(reachable: Server, home: str, role: Any) -> None:
    dsn = role()
    step = failed(dsn)
    assert (step.check, step.remedy) == (
        "schema",
        "GRANT SELECT ON queue_schema_version TO guest",
    )
    reachable.sql(step.remedy, name=BASE)
    step = failed(dsn)
    assert step.check == "rights"
    assert "to work, guest lacks SELECT on" in step.text


@pytest.mark.parametrize(
    ("purpose", "named"),
    [
        ("work", ["GRANT EXECUTE ON FUNCTION queue_workflows_", "USAGE ON SEQUENCE", "DELETE ON"]),
        (
            "submit",
            [
                "GRANT SELECT, INSERT (id, parcel_id, workflow_name, priority, context, out_dir,",
                "GRANT EXECUTE ON FUNCTION",
                "queue_workflows_enqueue(text,jsonb)",
                "USAGE ON SEQUENCE",
            ],
        ),
        ("read", ["GRANT SELECT ON TABLE"]),
        ("migrate", ["ALTER TABLE workflow_runs OWNER TO guest", "GRANT CREATE ON SCHEMA public"]),
    ],
)
def test_the_grants_that_it_names_are_what_was_missing(
    reachable: Server, home: str, role: Any, purpose: str, named: list[str]
) -> None:
    dsn = role(
        "GRANT SELECT ON queue_schema_version TO guest",
        "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC",
    )
    remedy = failed(dsn, purpose).remedy
    assert [part for part in named if part not in remedy] == []
    reachable.sql(*remedy.split("; "), name=BASE)
    assert passed(dsn, purpose)["rights"].text == f"all that it takes to {purpose}"


@pytest.mark.parametrize("purpose", ["work", "submit", "read"])
def test_the_printed_script_gives_a_role_all_that_it_lacks(
    reachable: Server, home: str, role: Any, purpose: str
) -> None:
    dsn = role()
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        script = console.printed("connect", "--for", purpose, "--sql")
        assert script.startswith("GRANT SELECT")
        assert {line[-1] for line in script.splitlines()} == {";"}
        reachable.sql(script, name=BASE)
        assert passed(dsn, purpose)["rights"].text == f"all that it takes to {purpose}"
        assert console.printed("connect", "--for", purpose, "--sql") == ""


@pytest.mark.parametrize("purpose", ["work", "submit", "read"])
def test_the_printed_script_gives_a_role_what_it_takes_from_public(
    reachable: Server, home: str, role: Any, purpose: str
) -> None:
    """A restore without the role has lost its grants, and each REVOKE from PUBLIC."""
    dsn = role(
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO PUBLIC",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO PUBLIC",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO PUBLIC",
    )
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        reachable.sql(console.printed("connect", "--for", purpose, "--sql"), name=BASE)
        assert passed(dsn, purpose)["rights"].text == f"all that it takes to {purpose}"
        assert console.printed("connect", "--for", purpose, "--sql") == ""


def test_what_connect_does_not_take_is_refused_in_a_sentence() -> None:
    assert "--for 'all' is none of work, migrate," in console.refusal("connect", "--for", "all")
    refused = console.refusal("connect", "--sql", "--json")
    assert "--sql and --json cannot be used together" in refused


def test_the_printed_script_takes_away_what_a_reader_does_not_need(
    reachable: Server, home: str, role: Any
) -> None:
    dsn = role(
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO guest",
        "REVOKE USAGE ON SCHEMA public FROM PUBLIC",
    )
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        script = console.printed("connect", "--for", "read", "--sql")
        assert script == "GRANT USAGE ON SCHEMA public TO guest;\n"
        reachable.sql(script, name=BASE)
        script = console.printed("connect", "--for", "read", "--sql")
        assert "REVOKE " in script
        reachable.sql(script, name=BASE)
        assert passed(dsn, "read")["rights"].text == "all that it takes to read"


def test_no_statement_is_printed_in_part(reachable: Server, home: str, role: Any) -> None:
    dsn = role("GRANT SELECT ON queue_schema_version TO guest")
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        done = console.command("connect")
    assert "GRANT" not in done.out
    assert "`queue-workflows connect --for work --sql` prints" in done.out
    assert "(+" not in done.out


def test_a_submitter_needs_no_more_to_submit(reachable: Server, home: str, role: Any) -> None:
    dsn = role("GRANT SELECT ON queue_schema_version TO guest")
    reachable.sql(*failed(dsn, "submit").remedy.split("; "), name=BASE)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('r', 'w')")
        conn.execute("INSERT INTO ingest_jobs (task_name, queue) VALUES ('t', 'q')")
        conn.execute(
            "INSERT INTO workflow_input_submissions (run_id, node_id, value) VALUES ('r', 'n', '1')"
        )
        assert conn.execute("SELECT status FROM workflow_runs").fetchall() == [("queued",)]
        for refused in ("UPDATE workflow_runs SET status = 'failed'", "DELETE FROM ingest_jobs",
                        "INSERT INTO workers (worker_id) VALUES ('x')"):  # fmt: skip
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(refused.encode())


@pytest.fixture
def submitter(reachable: Server, home: str, role: Any) -> str:
    """The DSN of a role with the grants that `connect --for submit` names, and no more."""
    dsn = role("GRANT SELECT ON queue_schema_version TO guest")
    reachable.sql(*failed(dsn, "submit").remedy.split("; "), name=BASE)
    return dsn


def test_a_submitter_uses_the_python_functions(
    reachable: Server, submitter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.configure(ingest_queues={"fetch"})
    config.register_ingest_task("t", lambda reason: None)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", submitter)
    try:
        run = run_store.insert_run(workflow_name="w", context={"a": 1}, priority=5)
        assert (run["status"], run["mode"]) == ("queued", "node")
        keys: dict[str, Any] = {"lock_key": "l", "partition_key": "p"}
        jobs = [
            jobs_api.enqueue(task_name="t", queue="fetch", args={"a": 1}),
            jobs_api.enqueue(task_name="t", queue="fetch", idempotency_key="k", **keys),
            *jobs_api.enqueue_many(
                [{"idempotency_key": key, "lock_key": "l"} for key in "cab"],
                task_name="t",
                queue="fetch",
            ),
            *jobs_api.enqueue_many(task_name="t", queue="fetch", args=[{}, {}]),
        ]
        again = jobs_api.enqueue(task_name="t", queue="fetch", idempotency_key="k", **keys)
        assert (again, again.created) == (jobs[1], False)
        assert node_queue.get_ingest_job(jobs[0]) is not None
        with db.connect() as conn:
            found = conn.execute("SELECT id FROM ingest_jobs ORDER BY seq").fetchall()
        assert [row["id"] for row in found] == jobs
        reachable.sql(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status)"
            f" VALUES ('{run['id']}', 'n', '__input__x', 'cpu', 'awaiting_input')",
            name=BASE,
        )
        queue_workflows.submit_input(run["id"], "n", {"answer": 1})
    finally:
        db.close_pool()


SET_BY_THE_ENGINE = {
    "workflow_runs": {
        "status": "'running'", "mode": "'step'", "definition": "'{}'", "generation": "1",
        "created_at": "now()", "queued_at": "now()", "start_attempts": "1", "error": "'e'",
        "resume_count": "1", "current_step_id": "'x'",
    },
    "ingest_jobs": {
        "status": "'running'", "worker_id": "'w'", "claim_no": "1", "attempts": "1",
        "lease_expires_at": "now()", "created_at": "now()", "generation": "1", "seq": "1",
        "crash_count": "1", "watchdog_retries": "1", "blocked_reason": "'admitted'",
        "admitted_at": "now()", "result": "'{}'", "claimed_by": "'w'", "error": "'e'",
        "idempotency_released": "true", "cancel_requested_at": "now()",
    },
    "workflow_input_submissions": {
        "status": "'processed'", "attempts": "1", "created_at": "now()", "available_at": "now()",
    },
}  # fmt: skip
OTHERWISE = {
    "workflow_runs": ("workflow_name", "'w'"),
    "ingest_jobs": ("task_name, queue", "'t', 'q'"),
    "workflow_input_submissions": ("run_id, node_id, value", "'r', 'n', '1'"),
}


def test_identity_counters_states_and_times_are_not_a_submitters(
    reachable: Server, submitter: str
) -> None:
    with psycopg.connect(submitter, autocommit=True) as conn:
        for table, columns in SET_BY_THE_ENGINE.items():
            names, values = OTHERWISE[table]
            for column, value in columns.items():
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(
                        f"INSERT INTO {table} ({names}, {column})"
                        f" VALUES ({values}, {value})".encode()
                    )
        for statement in (
            "UPDATE ingest_jobs SET priority = 1",
            "DELETE FROM workflow_runs",
            "TRUNCATE ingest_jobs",
            "SELECT setval('ingest_jobs_seq_seq', 1)",
            "INSERT INTO ingest_job_events (job_id, event_type) VALUES ('j', 'failed')",
            "INSERT INTO queue_settings (queue) VALUES ('q')",
            "SELECT queue_workflows_ask_partition('q', 'k', 1000000)",
            "SELECT queue_workflows_note_starts('q', 1000000)",
            "SELECT queue_workflows_ingest_step('w', 'h', 'q', 600, 1, false, false, NULL)",
            "SELECT queue_workflows_mend_lines()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement.encode())


def test_rights_past_the_purpose_are_found_and_revoked(
    reachable: Server, submitter: str, role: Any
) -> None:
    reachable.sql(
        "GRANT INSERT, DELETE ON workflow_runs TO guest",
        "GRANT INSERT (status), UPDATE (priority) ON ingest_jobs TO guest",
        "GRANT EXECUTE ON FUNCTION queue_workflows_audit TO PUBLIC",
        name=BASE,
    )
    step = failed(submitter, "submit")
    assert "guest" in step.text
    assert "need not have INSERT on workflow_runs" in step.text
    for statement in (
        "REVOKE INSERT, DELETE ON TABLE workflow_runs FROM guest",
        "ON TABLE ingest_jobs FROM guest",
        "REVOKE EXECUTE ON FUNCTION queue_workflows_audit(ingest_jobs,text) FROM PUBLIC",
        "GRANT INSERT (id, parcel_id, workflow_name",
    ):
        assert statement in step.remedy
    reachable.sql(*step.remedy.split("; "), name=BASE)
    assert passed(submitter, "submit")["rights"].level == OK
    with psycopg.connect(submitter, autocommit=True) as conn:
        conn.execute("INSERT INTO workflow_runs (workflow_name) VALUES ('w')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("INSERT INTO workflow_runs (workflow_name, status) VALUES ('w', 'x')")


@pytest.mark.parametrize("purpose", ["submit", "work"])
def test_connect_names_the_variable_that_confines_runs_for_a_submitter(
    home: str, purpose: str
) -> None:
    named = passed(home, purpose).get("files")
    if purpose == "submit":
        assert named is not None
        assert "QUEUE_WORKFLOWS_OUT_ROOTS=/" in named.text
    else:
        assert named is None


def test_what_is_needed_for_a_purpose_names_every_table() -> None:
    """All that the schema page describes, except what only apps or the tables' owner write."""
    others = {"workflow_run_files", "lock_turns", "partition_turns"}
    views = {"queue_partition_limits"}
    assert set(rights.PURPOSES["work"]) == set(catalog.PURPOSES) - others | views


# --- clock, listen, round trip -----------------------------------------------------------------


def test_a_clock_that_is_off(home: str, tmp_path: Any) -> None:
    wall = faketime.Wall(tmp_path / "wall")
    wall.put(1)
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=home, **wall.env) as cli:
        done = cli.run("queue-workflows", "connect", "--json")
        assert done.process.returncode == 0, done.err
        found = {step["check"]: step for step in json.loads(done.out)["steps"]}
    assert found["clock"]["level"] == WARNING
    behind_s = float(found["clock"]["text"].split()[3])
    assert abs(behind_s - 3600) < 60
    assert "time server" in found["clock"]["remedy"]


class Pooler(Proxy):
    """What a pooler in transaction mode does to a session: another process, no notifications."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._rest: dict[int, bytes] = {}

    def altered(self, source: socket.socket, data: bytes) -> bytes:
        data, out = self._rest.get(id(source), b"") + data, b""
        while len(data) >= 5 and len(data) >= 1 + struct.unpack("!i", data[1:5])[0]:
            size = 1 + struct.unpack("!i", data[1:5])[0]
            message, data = data[:size], data[size:]
            if message[:1] == b"K":
                message = message[:5] + struct.pack("!i", 77) + message[9:]
            if message[:1] != b"A":
                out += message
        self._rest[id(source)] = data
        return out

    def _forward(self, source: socket.socket) -> None:
        flow = self._flows[source]
        if flow.towards_server:
            super()._forward(source)
            return
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
        if data:
            flow.target.sendall(self.altered(source, data))
        else:
            self._end(source)


def test_a_pooler_in_transaction_mode(db: Any, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pooler(dsn) as pooler:
        url = f"{pooler.dsn}&sslmode=disable"
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", url)
        step = failed(url)
    assert step.check == "listen"
    assert "a pooler in transaction mode is in between" in step.text
    assert "QUEUE_WORKFLOWS_POLL_ONLY=1" in step.remedy


class SlowWay(Proxy):
    """Takes 60 ms for all that the client sends."""

    def _forward(self, source: socket.socket) -> None:
        if self._flows[source].towards_server:
            threading.Event().wait(0.06)
        super()._forward(source)


def test_a_way_that_is_slow(home: str) -> None:
    with SlowWay(home) as way:
        step = passed(way.dsn)["round trip"]
    assert step.level == WARNING
    assert "nearer" in step.remedy


class Cut(Proxy):
    """Cuts a connection that asks for rights."""

    def _forward(self, source: socket.socket) -> None:
        if b"_privilege(" in source.recv(65536, socket.MSG_PEEK):
            self._end(source)
        else:
            super()._forward(source)


def test_a_server_that_goes_away_meanwhile(home: str) -> None:
    with Cut(home) as way:
        step = failed(way.dsn)
    assert (step.check, "it broke off" in step.text) == ("server", True)


# --- the command -------------------------------------------------------------------------------


def test_the_command_prints_ok_and_exits_with_0(home: str) -> None:
    with commands.commands() as cli:
        done = cli.run("queue-workflows", "connect", home)
        assert done.process.returncode == 0, done.err
        first, *lines = done.out.splitlines()
        assert CANARY not in done.out + done.err
    assert first.startswith(f"database {BASE} at 127.0.0.1:")
    assert [line.split()[0] for line in lines] == ["ok"] * len(STEPS)


def test_the_command_stops_at_the_first_fault_with_1(home: str) -> None:
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=f"postgresql://u:{CANARY}@127.0.0.1:1/x") as cli:
        done = cli.run("queue-workflows", "connect")
        assert done.process.returncode == 1
        lines = done.out.splitlines()
        assert [line.split()[0] for line in lines[1:3]] == ["ok", "error"]
        assert lines[-1].startswith("not checked: tls, login, database")
        as_json = json.loads(cli.run("queue-workflows", "connect", "--json").out)
        assert CANARY not in done.out + done.err + str(as_json)
    assert as_json["failed"] == "port"
    assert as_json["steps"][-1]["level"] == "error"
    assert as_json["not_reached"][0] == "tls"


@pytest.mark.parametrize("user", [f"password={CANARY}", f"postgresql://u:{CANARY}@h/x"])
def test_no_step_shows_a_password(reachable: Server, home: str, user: str) -> None:
    with database.environment(
        QUEUE_WORKFLOWS_DB_URL=reachable.dsn(quote(user, safe=""), "wrong", BASE)
    ):
        for arguments in ((), ("--json",)):
            done = console.command("connect", *arguments)
            assert (done.code, CANARY in done.out) == (1, False)
            assert "password authentication failed for user" in done.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no embedded server"),
        ((f"postgresql://u:{CANARY}@[broken",), "cannot be read"),
        ((f"postgresql://u:{CANARY}@h:notaport/x",), "the DSN cannot be read"),
        ((f"postgresql://u:{CANARY}/more@h/x",), "the DSN cannot be read: it should look"),
        ((f"postgresql://u:start@{CANARY}@h/x",), "an @ in it is written %40"),
        ((f"postgresql://u:{CANARY}@h/x", "--for", "fun"), "work, migrate, submit, read"),
    ],
)
def test_an_unusable_dsn_exits_with_2(
    arguments: tuple[str, ...], text: str, cli_none: Commands
) -> None:
    done = cli_none.run("queue-workflows", "connect", *arguments)
    line = commands.refused(done)
    assert text in line
    assert CANARY not in line


@pytest.mark.parametrize("port", ["notaport", "70000"])
def test_a_port_of_the_environment_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@127.0.0.1/x")
    monkeypatch.setenv("PGPORT", port)
    reason = f"{port!r} is not a port: correct PGPORT, or the port in the service file\n"
    assert console.refusal("connect").endswith(reason)


@pytest.fixture
def cli_none(tmp_path: Any) -> Generator[Commands]:
    with commands.commands(QUEUE_WORKFLOWS_EMBEDDED_DIR=str(tmp_path / "none")) as cli:
        yield cli


def test_the_dsn_of_the_app_is_used(db: Any, dsn: str, cli: Commands) -> None:
    done = cli.run("queue-workflows", "connect", "--for", "read")
    assert done.process.returncode == 0, done.err
    name = database.Database(dsn).name
    assert done.out.startswith(f"database {name} at ")
