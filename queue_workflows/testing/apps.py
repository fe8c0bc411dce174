"""Load an app into this process for one test, and restore the configuration afterwards."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Callable, Generator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from queue_workflows import config, declare, errors, model_registry
from queue_workflows.runtime import app_loading
from queue_workflows.tasks import registry

App: TypeAlias = "str | Callable[[], object] | None"
_loaded: dict[str, dict[str, Any]] = {}
"""The configuration that each app without a callable made; importing it again has no effect."""


def load(app: App) -> None:
    """Reset the configuration and load `app` into it; None keeps the configuration as it is.

    A module that this process imported before declares nothing on a second import. So the
    declarations of the app's modules are installed again. Raises `InvalidConfig` and `AppFailed`.
    """
    if app is None:
        return
    config.reset_for_tests()
    registry.register_decorated()
    if not isinstance(app, str):
        app()
        _install_declared(app.__module__)
    elif ":" in app:
        app_loading.load_app(app)
        _install_declared(app.partition(":")[0])
    else:
        if app not in _loaded:
            if app in sys.modules:
                importlib.reload(sys.modules[app])
            app_loading.load_app(app)
            _install_declared(app)
            _loaded[app] = _settings()
        _set(_loaded[app])


def _install_declared(app_module: str) -> None:
    """Install the nodes and workflows of the app's modules, except where a name is taken."""
    for module in _modules_of(app_module):
        for thing in declare.declared_in(module):
            # The app may have installed another node under this name on purpose.
            with contextlib.suppress(errors.InvalidConfig):
                thing.install()


def _modules_of(app_module: str) -> list[str]:
    """Return the app's module and the modules that it uses, of its package or with declarations.

    Declarations of modules that the app does not use belong to another app of this test run.
    """
    package = app_module.partition(".")[0]
    found = {app_module: None}
    for name in (waiting := [app_module]):
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            used = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
            if used in found or used not in sys.modules:
                continue
            if used.partition(".")[0] == package or declare.declared_in(used):
                found[used] = None
                waiting.append(used)
    return list(found)


def _module_of(value: object) -> str:
    try:
        module = getattr(value, "__module__", None)
    except Exception:  # noqa: BLE001  a lazy object of the app may raise anything
        return ""
    return module if isinstance(module, str) else ""


@contextlib.contextmanager
def restored() -> Generator[None]:
    """Restore configuration and model registry when the block ends."""
    settings, models = _settings(), model_registry.known_ids()
    specs = [model_registry.get(model) for model in models]
    try:
        yield
    finally:
        _set(settings)
        model_registry.clear_for_tests()
        for spec in specs:
            model_registry.register(spec)


def _settings() -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(config.get_config()).items()}


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config.get_config(), name, copy.copy(value))
