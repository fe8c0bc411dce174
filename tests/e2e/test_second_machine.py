"""A worker on a second machine works over TCP with a password; `health` reports it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from queue_workflows import db, node_queue, run_store
from tests.support import commands, console, factories, flow, timeouts, toy_app
from tests.support.commands import TOYHOST, Commands, refused
from tests.support.tcp_server import Server
from tests.support.wait import until

PASSWORD = "canary77"
NOWHERE = f"postgresql://someone:{PASSWORD}@127.0.0.1:1/none"


class Machine(NamedTuple):
    """Another machine: the words before a command there, its address, and the server's from it."""

    prefix: list[str]
    address: str
    server: str
    namespace: str


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _loopback() -> Machine:
    assert "QW_TEST_NAMESPACES" not in os.environ, "no network namespace can be made"
    return Machine([], "127.0.0.1", "127.0.0.1", "")


@pytest.fixture
def machine() -> Generator[Machine]:
    """A network namespace with its own address; who may not make one is on the loopback.

    With QW_TEST_NAMESPACES set that is an error.
    """
    tag = secrets.token_hex(3)
    name, here, there = f"qw-{tag}", f"qwa{tag}", f"qwb{tag}"
    net = f"10.213.{secrets.randbelow(254) + 1}"
    if os.geteuid() != 0 or not _ip("netns", "add", name):
        yield _loopback()
        return
    inside = ("netns", "exec", name, "ip")
    try:
        made = (
            _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            and _ip("address", "add", f"{net}.1/24", "dev", here)
            and _ip("link", "set", here, "up")
            and _ip(*inside, "address", "add", f"{net}.2/24", "dev", there)
            and _ip(*inside, "link", "set", there, "up")
        )
        if made:
            yield Machine(["ip", "netns", "exec", name], f"{net}.2", f"{net}.1", name)
        else:
            yield _loopback()
    finally:
        _ip("netns", "delete", name)
        _ip("link", "delete", here)


def _which(program: str) -> str:
    places = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
    return next(str(Path(p) / program) for p in places if (Path(p) / program).exists())


@pytest.fixture
def shared(reachable: Server, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The DSN of a database with the schema, as the second machine writes it."""
    reachable.sql(f"CREATE ROLE letters LOGIN PASSWORD '{PASSWORD}'")
    reachable.sql("CREATE DATABASE fleet_test OWNER letters")
    dsn = reachable.dsn("letters", PASSWORD, "fleet_test", machine.server)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    db.bootstrap()
    yield dsn
    db.close_pool()
    reachable.sql("DROP DATABASE fleet_test WITH (FORCE)", "DROP ROLE letters")


def at(machine: Machine, *words: str) -> list[str]:
    """A console script as the second machine runs it."""
    if not machine.prefix:
        return list(words)
    return [_which(machine.prefix[0]), *machine.prefix[1:], commands.script(words[0]), *words[1:]]


def test_a_worker_on_a_second_machine_works_over_tcp_with_a_password(
    shared: str, machine: Machine, tmp_path: Path
) -> None:
    toy_app.setup()
    env = {"QUEUE_WORKFLOWS_DB_URL": shared, "QUEUE_WORKFLOWS_HOST_LABEL": "box-2"}
    with commands.commands(**env) as cli:
        looked = cli.run(*at(machine, "queue-workflows", "connect", "--json"))
        assert looked.process.returncode == 0, looked.out
        assert "is an address" in json.loads(looked.out)["steps"][0]["text"]
        orchestrator = cli.start("queue-orchestrator", "--app", TOYHOST)
        worker = cli.start(*at(machine, "queue-claim-worker", "--queue=cpu", "--app", TOYHOST))
        context = {"folder": str(tmp_path)}
        run = run_store.insert_run(workflow_name="chain", context=context)["id"]
        until(lambda: flow.status(run) == "completed", timeout_s=60)
        assert {job["host_label"] for job in node_queue.list_jobs_for_run(run)} == {"box-2"}
        with psycopg.connect(shared) as conn:
            rows = conn.execute(
                "SELECT client_addr::text FROM pg_stat_activity WHERE client_addr IS NOT NULL"
                " AND datname = current_database()"
            ).fetchall()
        assert any(str(address).startswith(machine.address) for (address,) in rows)
        listed = cli.run("queue-workflows", "workers", "--json")
        seen = {(row["host_label"], row["queue"]): row["state"] for row in json.loads(listed.out)}
        assert seen[("box-2", "cpu")] in {"idle", "busy"}
        for command in (looked, orchestrator, worker, listed):
            assert PASSWORD not in command.out + command.err
        for command in (worker, orchestrator):
            command.send(signal.SIGTERM)
            assert command.wait() == 0


def test_connect_reports_that_its_machine_is_cut_off(shared: str, machine: Machine) -> None:
    if machine.namespace:
        (device,) = [name for name in _devices(machine) if name.startswith("qwb")]
        assert _ip("netns", "exec", machine.namespace, "ip", "link", "set", device, "down")
        dsn = shared
    else:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dsn = f"postgresql://u:{PASSWORD}@127.0.0.1:{closed.getsockname()[1]}/x"
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as cli:
        done = cli.run(*at(machine, "queue-workflows", "connect", "--timeout", "1", "--json"))
        assert done.process.returncode == 1
        assert json.loads(done.out)["failed"] == "port"
        assert PASSWORD not in done.out + done.err


def _devices(machine: Machine) -> list[str]:
    done = subprocess.run(
        ["ip", "netns", "exec", machine.namespace, "ip", "-json", "link"],
        capture_output=True, check=True,
    )  # fmt: skip
    return [link["ifname"] for link in json.loads(done.stdout)]


def test_a_wrong_password_gets_no_worker_in(shared: str, machine: Machine) -> None:
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=shared.replace(PASSWORD, "wrong")) as cli:
        done = cli.run(*at(machine, "queue-workflows", "connect"))
        assert done.process.returncode == 1
        assert "password authentication failed" in done.out
        refused(cli.run(*at(machine, "queue-workflows", "workers")))


# --- health ------------------------------------------------------------------------------------


def worker(queue: str, age_s: float, **more: Any) -> dict[str, Any]:
    """A worker that was seen so long ago, as `factories.insert` takes it."""
    return {"host_label": "machine", "queue": queue, "pid": 1, "age_s": age_s} | more


KILLED = {"state": "dead", "detail": {"signal": 9}}


@pytest.mark.parametrize(
    ("rows", "queues", "expected"),
    [
        ([worker("cpu", 1)], [], {"cpu": "alive"}),
        ([worker("cpu", 1)], ["cpu"], {"cpu": "alive"}),
        ([worker("cpu", 1)], ["cpu", "gpu"], {"cpu": "alive", "gpu": "silent"}),
        ([worker("cpu", 90)], [], {"cpu": "silent"}),
        ([worker("cpu", 50)], [], {"cpu": "alive"}),
        ([worker("cpu", 90), worker("cpu", 1)], [], {"cpu": "alive"}),
        ([worker("cpu", 1), worker("cpu", 90)], [], {"cpu": "alive"}),
        ([worker("cpu", 1, state="parked")], ["cpu"], {"cpu": "alive"}),
        ([worker("cpu", 1, **KILLED)], ["cpu"], {"cpu": "silent"}),
        ([worker("cpu", 1, **KILLED)], [], {}),
        ([worker("cpu", 1, host_label="other")], ["cpu"], {"cpu": "silent"}),
        ([worker("gpu", 90), worker("cpu", 1)], ["cpu"], {"cpu": "alive"}),
    ],
)
def test_health_reads_heartbeats(
    conn: db.Connection, rows: list[dict[str, Any]], queues: list[str], expected: dict[str, str]
) -> None:
    for number, row in enumerate(rows):
        columns = {name: value for name, value in row.items() if name != "age_s"}
        factories.insert(conn, "workers", worker_id=f"w{number}", **columns)
        conn.execute(
            "UPDATE workers SET last_seen = now() - make_interval(secs => %s) WHERE worker_id = %s",
            (row["age_s"], f"w{number}"),
        )
    named = [word for queue in queues for word in ("--queue", queue)]
    assert console.reply("health", "--host", "machine", *named)["queues"] == expected


def test_health_is_an_exit_code(cli: Commands) -> None:
    probe = ("queue-workflows", "health", "--host", "machine", "--queue", "cpu")
    none = cli.run(*probe)
    assert (none.process.returncode, none.out) == (1, "silent: cpu silent\n")
    with db.connect() as conn:
        values = {"worker_id": "w", "host_label": "machine", "queue": "cpu", "pid": 1}
        factories.insert(conn, "workers", **values)
    alive = cli.run(*probe, "--json")
    assert alive.process.returncode == 0
    assert json.loads(alive.out)["queues"] == {"cpu": "alive"}
    assert cli.run("queue-workflows", "health", "--host", "nobody").process.returncode == 1


def test_a_database_that_does_not_answer_is_no_evidence_against_a_worker(cli: Commands) -> None:
    for strict, code in ((), 0), (("--strict",), 1):
        done = cli.run("queue-workflows", "health", *strict, QUEUE_WORKFLOWS_DB_URL=NOWHERE)
        assert done.process.returncode == code
        assert done.out.startswith("unknown: database none at 127.0.0.1:1 does not answer")
        assert PASSWORD not in done.out + done.err


def test_a_database_that_answers_too_late_is_no_evidence_either(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.shorten_lock_waits(monkeypatch, 0.2)
    for strict, code in ((), 0), (("--strict",), 1):
        with conn.transaction():
            conn.execute("LOCK TABLE workers IN ACCESS EXCLUSIVE MODE")
            done = console.command("health", *strict)
        assert (done.code, done.err) == (code, "")
        assert done.out.startswith("unknown: ") and "lock timeout" in done.out
