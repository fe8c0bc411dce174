"""Choose, open, create and remove a run's folders; follow no symbolic link out of them.

Another process may replace a checked folder by a link before the engine uses it. Therefore each
component of a path is opened relative to its parent's descriptor with `O_NOFOLLOW`, which refuses a
link, and later operations use the descriptor. This also works on macOS, without `/proc`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from queue_workflows import config, errors
from queue_workflows.types import Row

SCRATCH = ".scratch"
MAX_PATH_CHARS = 4096
"""Longest path that Linux accepts. A longer one from a row is refused before any system call."""
NAME_BYTES = 255
"""Longest name of one path component, in bytes, that common file systems accept."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LINK = (errno.ELOOP, errno.ENOTDIR)
"""The errors of opening a symbolic link, or a file, with O_DIRECTORY and O_NOFOLLOW."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}", re.ASCII)


def roots() -> list[str]:
    """Return the resolved folders of OUT_ROOTS; if empty, runs may keep their files anywhere."""
    named = config.OUT_ROOTS.read()
    return [os.path.realpath(root) for root in named.split(os.pathsep) if root] if named else []


def outputs_folder() -> Path:
    """Return the parent folder of runs' folders; it may not exist yet.

    It is OUTPUTS_DIR, else `runs` in the first of OUT_ROOTS, else `queue_workflows/outputs` in the
    user's data folder (root: `/var/lib/queue_workflows/outputs`). Raises `InvalidConfig`.
    """
    if chosen := config.OUTPUTS_DIR.read():
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:
            name = config.OUTPUTS_DIR.variables[0]
            text = f"{name}={chosen!r:.200}: its home folder does not exist; name another folder"
            raise errors.InvalidConfig(text) from None
    if allowed := roots():
        # A subfolder, because a run id may equal the name of an unrelated folder in the root.
        return Path(allowed[0], "runs")
    try:
        return config.data_folder() / "outputs"
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir(), "queue_workflows-outputs")


def of_run(run_id: str) -> str:
    """Return the folder of a run without an `out_dir`, the same on every call.

    If the id is not a simple file name, its hash is used instead, so that it cannot lead elsewhere.
    """
    name = run_id
    if not _PLAIN_NAME.fullmatch(run_id):
        name = "run-" + hashlib.sha256(run_id.encode(errors="replace")).hexdigest()[:32]
    return os.fspath(outputs_folder() / name)


def given(run: Row) -> Row:
    """Return the run; if it lacks an `out_dir`, a copy with the folder of `of_run`."""
    return run if run["out_dir"] is not None else run | {"out_dir": of_run(run["id"])}


def check(out_dir: str | None) -> None:
    """Raise `FolderRefused` unless `out_dir` resolves into a root of OUT_ROOTS.

    Do nothing without an `out_dir`, or if OUT_ROOTS is not set.
    """
    if out_dir is not None and (allowed := roots()):
        _place(out_dir, allowed)


def root_of(out_dir: str) -> tuple[str, tuple[str, ...]]:
    """Return the root that a run's folder is in, and the names of the folders below it.

    The roots are OUT_ROOTS or, if that is not set, the engine's own folder. Raises `FolderRefused`
    for a folder outside of them, since a row may name any folder, such as `/etc`.
    """
    if allowed := roots():
        return _place(out_dir, allowed)
    top, own = os.path.realpath(outputs_folder()), Path(os.path.realpath(out_dir))
    if str(own) == top or not own.is_relative_to(top):
        raise errors.FolderRefused(
            f"the run's files are in {out_dir!r:.200}: set OUT_ROOTS to a folder around it"
        )
    return top, own.relative_to(top).parts


@contextlib.contextmanager
def opened(out_dir: str, *parts: str, create: bool = False) -> Generator[int]:
    """Yield the descriptor of `out_dir`, or of the folder that `parts` name below it.

    `parts` are names of single folders. `create` creates missing folders, except a root of
    OUT_ROOTS, as an empty folder there would hide that its file system is not mounted. Raises
    `FolderRefused` for a path outside the roots, and for a symbolic link or a file on the way.
    Raises `InvalidPayload` for an impossible path, and OSError if a folder cannot be opened.
    """
    allowed = roots()
    if not allowed:
        _plain(out_dir, f"out_dir {out_dir!r:.120}")
        if create:
            os.makedirs(out_dir, exist_ok=True)  # noqa: PTH103  a Path would lose a trailing "//"
        # Without OUT_ROOTS `out_dir` may be any folder, also a link; only names below are checked.
        start, names = os.path.realpath(out_dir), [*parts]
    else:
        start, below = _place(out_dir, allowed)
        names = [*below, *parts]
    fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, name in enumerate(names):
            below_fd = _step(fd, name, os.path.join(start, *names[: number + 1]), create=create)  # noqa: PTH118
            os.close(fd)
            fd = below_fd
        yield fd
    finally:
        os.close(fd)


def inside(out_dir: str, path: str, what: str) -> tuple[str, ...]:
    """Resolve `path` relative to `out_dir` and return the names of the folders on the way.

    Raises `InvalidPayload`, whose text begins with `what`, if the resolved path is not below
    `out_dir`, for example because of a symbolic link.
    """
    _plain(out_dir, f"out_dir {out_dir!r:.120}")
    _plain(path, what)
    top = os.path.realpath(out_dir)
    folder = Path(os.path.realpath(Path(top) / path))
    if str(folder) == top or not folder.is_relative_to(top):
        raise errors.InvalidPayload(f"{what} leads outside the run's out_dir")
    return folder.relative_to(top).parts


def make(out_dir: str, path: str, what: str) -> Path:
    """Create the folder `path` below `out_dir` and return it, resolved. Raises as `opened` does."""
    names = inside(out_dir, path, what)
    with opened(out_dir, *names, create=True):
        return Path(os.path.realpath(out_dir), *names)


class Scratch:
    """A new, empty folder below `parent`, created and removed without following symbolic links.

    The object keeps a descriptor of `parent` open until `remove()`. So it removes the folder that
    it created, even if a parent folder was renamed or replaced meanwhile.
    """

    def __init__(self, parent: str, parent_fd: int, prefix: str) -> None:
        self._parent_fd = os.dup(parent_fd)
        self._name = f"{prefix}{secrets.token_hex(8)}"
        try:
            os.mkdir(self._name, 0o700, dir_fd=self._parent_fd)
        except OSError:
            os.close(self._parent_fd)
            raise
        self.path = Path(parent, self._name)

    def remove(self) -> None:
        """Remove the folder and its contents, and close the descriptor.

        Errors are ignored, so files may be left.
        """
        try:
            with contextlib.suppress(OSError, RecursionError):
                _empty(self._name, self._parent_fd)
            with contextlib.suppress(OSError):
                os.rmdir(self._name, dir_fd=self._parent_fd)
        finally:
            os.close(self._parent_fd)


def _empty(name: str, parent_fd: int) -> None:
    # shutil.rmtree takes no `dir_fd` before Python 3.11, and resolves the parent folders by name. A
    # link that was planted in their place would make it delete files elsewhere.
    for _, folders, files, fd in os.fwalk(name, topdown=False, dir_fd=parent_fd):
        for file in files:
            with contextlib.suppress(OSError):
                os.unlink(file, dir_fd=fd)
        for folder in folders:
            try:
                os.rmdir(folder, dir_fd=fd)
            except NotADirectoryError:  # a link to a folder
                with contextlib.suppress(OSError):
                    os.unlink(folder, dir_fd=fd)
            except OSError:
                continue


def _step(fd: int, name: str, shown: str, *, create: bool) -> int:
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)
    try:
        return os.open(name, _FOLDER, dir_fd=fd)
    except OSError as error:
        if error.errno not in _LINK:
            raise
        raise errors.FolderRefused(
            f"{shown!r:.300} is a symbolic link or not a folder, so the engine does not use it for "
            "the run's files: remove this link or file, or submit the run with another out_dir"
        ) from None


def _place(out_dir: str, allowed: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the root that `out_dir` resolves into, and the names of the folders below it."""
    variable = config.OUT_ROOTS.variables[0]
    remedy = (
        f"the folders of {variable} ({os.pathsep.join(allowed)}): submit the run with an out_dir "
        f"inside one of them, or add a folder to {variable}"
    )
    try:
        _plain(out_dir, f"out_dir {out_dir!r:.120}")
        resolved = Path(os.path.realpath(out_dir))
    except (errors.InvalidPayload, OSError) as error:
        # A retry cannot succeed. FolderRefused fails the run at once, with this reason.
        raise errors.FolderRefused(
            f"the run's out_dir {out_dir!r:.300} cannot be resolved ({error}). It must lie in"
            f" {remedy}"
        ) from None
    for root in allowed:
        if resolved.is_relative_to(root):
            return root, resolved.relative_to(root).parts
    raise errors.FolderRefused(f"the run's out_dir {out_dir!r:.300} is outside {remedy}")


def _plain(path: str, what: str) -> None:
    """Raise `InvalidPayload` for a path with a NUL, or one that is too long.

    Otherwise a system call would raise ValueError or OSError for it.
    """
    if "\0" in path:
        raise errors.InvalidPayload(f"{what} has a NUL character: it is not a path")
    if len(path) > MAX_PATH_CHARS or any(
        len(os.fsencode(name)) > NAME_BYTES for name in path.split("/")
    ):
        raise errors.InvalidPayload(f"{what} is too long for a path ({len(path)} characters)")
