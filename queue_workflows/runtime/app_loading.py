"""Import the app that `--app` names, and return its name for rows and messages."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from queue_workflows import config, errors

R = TypeVar("R")

_IMPORTERS = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}
_NO_SOURCES = {"__main__", "queue_workflows"}


def load_app(spec: str | None) -> str | None:
    """Import `package.module[:callable]`, call the callable if one is named, return that spec.

    Without `spec`, `QUEUE_WORKFLOWS_APP` is used; if that is not set either, it returns None.
    Raises `InvalidConfig` if the module or the callable does not exist, and `AppFailed` for an
    error of the app, also for SystemExit; errors of this package pass through.
    """
    chosen = spec or os.environ.get("QUEUE_WORKFLOWS_APP")
    if not chosen:
        return None
    source = f"--app {chosen}" if spec else f"QUEUE_WORKFLOWS_APP={chosen}"
    module_name, _, attribute = chosen.partition(":")
    if not config.MODULE_NAME.fullmatch(module_name):
        raise errors.InvalidConfig(f"{source} should look like package.module[:callable]")
    # Set before the app's code runs, since that may use the database of its project.
    config.get_config().app = chosen
    target: Any = _import_app(source, module_name)
    for part in filter(None, attribute.split(".")):
        owner = target
        # A package may import its modules as they are read.
        target = _of_app(
            f"{source}: reading {part!r}", lambda owner=owner, part=part: getattr(owner, part, None)
        )
        if target is None:
            raise errors.InvalidConfig(f"{source}: {_lacks(module_name, owner, attribute, part)}")
    if attribute:
        if not callable(target):
            raise errors.InvalidConfig(f"{source}: {attribute!r} cannot be called")
        _of_app(f"{source}: {attribute}()", target)
    return chosen


def _lacks(module_name: str, owner: Any, attribute: str, part: str) -> str:
    """Return the text of an error with the file, as another package's module may have the name."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    found = f" ({file})" if file else ""
    return f"{module_name}{found} has no {attribute!r}{errors.hint(part, dir(owner))}"


def sources(app: str) -> list[str]:
    """Return the Python files of a loaded app: its package, or its module and the ones next to it.

    Only imported modules next to it count, and installed packages do not.
    """
    top = sys.modules[app.partition(":")[0].partition(".")[0]]
    file = getattr(top, "__file__", None) or ""
    if (folders := getattr(top, "__path__", None)) is None:
        beside = file.rpartition(os.sep)[0] + os.sep
        loaded = {name: getattr(each, "__file__", None) for name, each in [*sys.modules.items()]}
        return sorted({file} | {
            each for name, each in loaded.items()
            if each and each.startswith(beside) and each.endswith(".py")
            and "site-packages" not in each and name.partition(".")[0] not in _NO_SOURCES
        })  # fmt: skip
    found: list[str] = []
    for folder in folders:
        for root, names, files in os.walk(folder):
            names[:] = [name for name in names if not name.startswith((".", "__"))]
            found += [f"{root}{os.sep}{name}" for name in files if name.endswith(".py")]
    return sorted(found)


def checksum(files: Iterable[str]) -> str:
    """Return a checksum of the content of these files; a file that is gone counts as empty."""
    import hashlib

    made = hashlib.sha256()
    for name in files:
        content = b""
        with contextlib.suppress(OSError), open(name, "rb") as file:  # noqa: PTH123  as above
            content = file.read()
        made.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return made.hexdigest()


def app_name() -> str:
    """Return the name of this process's app, which owns the schedules that its code names.

    It is the name of `configure(app_name=...)`, else the `--app` of the process, else the name of
    its main program: the module of `python -m`, or the file.
    """
    settings = config.get_config()
    return (settings.app_name or settings.app or _main_program())[: config.MAX_APP_NAME]


def names_app() -> bool:
    """Return whether this process has an app: `--app`, or `configure(app_name=...)`."""
    settings = config.get_config()
    return bool(settings.app_name or settings.app)


def _main_program() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__")
    file: str | None = getattr(main, "__file__", None)
    return os.path.basename(file) if file else "python"  # noqa: PTH119  pathlib costs 20 ms


def describe_app() -> str:
    """Return the app of this process in words: `a worker of app letters:setup 1.7`."""
    app = config.get_config().app
    if app is None:
        return "a worker without an app"
    top = sys.modules.get(app.partition(":")[0].partition(".")[0])
    version = getattr(top, "__version__", None)
    return f"a worker of app {app}" + (f" {version}" if isinstance(version, str) else "")


def _import_app(source: str, module_name: str) -> Any:
    import importlib
    import pkgutil

    folder = os.getcwd()  # noqa: PTH109  pathlib costs 20 ms of import time
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _of_app(f"{source}: importing it", lambda: importlib.import_module(module_name))
    except errors.AppFailed as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not (module_name + ".").startswith(missing + "."):
            raise
        parent = os.path.join(folder, *missing.split(".")[:-1])  # noqa: PTH118  as above
        modules = [found.name for found in pkgutil.iter_modules([parent])]
        meant = errors.hint(missing.rpartition(".")[2], modules)
        raise errors.InvalidConfig(
            f"{source}: no module {missing!r} here"
            + (meant or "; run from its folder, or install the package")
        ) from cause


def _of_app(what: str, call: Callable[[], R]) -> R:
    """Call app code and return its result; raise `AppFailed` with only the frames of the app."""
    try:
        return call()
    except (errors.QueueWorkflowsError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  boundary around app code: an app may exit
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_globals.get("__name__", "")
            if module != __name__ and module.partition(".")[0] not in _IMPORTERS:
                break
            trace = trace.tb_next
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        if trace is not None:
            file = trace.tb_frame.f_code.co_filename
            text += f" ({file.rpartition(os.sep)[2]}, line {trace.tb_lineno})"
        raise errors.AppFailed(f"{what} failed: {text}") from error.with_traceback(trace)
