"""Give every test a clean process, and a real database to those that ask for one."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from queue_workflows import config
from tests.support import examples, process_state, wait

if TYPE_CHECKING:
    from queue_workflows.db import Connection
    from tests.support.commands import Commands
    from tests.support.database import Database
    from tests.support.flow import Flow
    from tests.support.proxy import Proxy

DATABASE_FIXTURES = frozenset({"own_database", "dsn", "db", "fresh_database", "migrated_database"})
THREAD_GRACE_S = 2.0
WAITING = ("tests/faults/", "tests/e2e/", "tests/hostile/")
"""Folders whose tests wait for processes."""
LONGEST = (
    "tests/faults/test_failpoints.py",
    "tests/faults/test_every_statement.py",
    "tests/faults/test_schedulers.py",
    "tests/faults/test_alert_senders.py",
    "tests/e2e/test_soak.py",
    "tests/hostile/",
    "tests/faults/test_ownership.py",
    "tests/e2e/test_demo_command.py",
    "tests/e2e/test_benchmarks.py",
)
"""Of these the tests that wait longest, half a minute and more: they come first of all."""
QUICK = ("tests/e2e/test_smoke.py",)
"""Of these what is not marked `slow`. A plain `pytest` leaves out what is."""
UNIT = Path(__file__).parent / "unit"
BROWSER = "tests/browser/"
"""Of these each needs Debian's chromium. `.ci/run` runs them alone, one after the other."""
NEEDS = {
    "browser": "playwright",
    "e2e/test_local_models.py": "sklearn",
    "e2e/test_mutation.py": "cosmic_ray",
    "e2e/test_service_schema.py": "schemathesis",
    "e2e/test_site.py": "mkdocs",
    "e2e/test_spans.py": "opentelemetry.sdk",
    "e2e/test_wheel.py": "build",
    "integration/test_app_connections.py": "django",
    "integration/test_declare_types.py": "pyright",
    "integration/test_enqueue_on_app_connections.py": "django",
    "integration/test_event_export.py": "opentelemetry.sdk",
    "integration/test_range_errors.py": "django",
    "integration/test_secrets.py": "opentelemetry.sdk",
    "unit/test_trace_context.py": "opentelemetry.sdk",
}
"""The files and folders that need a module of the extra `dev`. They are collected only where it is
installed; with `QW_TEST_DEV=1`, as in CI, a missing one is an error."""


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


MISSING = {file: module for file, module in NEEDS.items() if _is_missing(module)}
if MISSING and os.environ.get("QW_TEST_DEV"):
    raise pytest.UsageError(f"install the extra dev: {', '.join(sorted({*MISSING.values()}))}")
collect_ignore = sorted(MISSING)


# Some thousand processes would each compile all that they import, and pytest every test module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell without job control starts background commands with both ignored; children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# Before anything runs: no test, and no import of one, ever sees the database of the person here.
GIVEN = process_state.forget_environment()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """What was given goes along to the processes of `-n`, which inherit the cleaned environment."""
    node.workerinput["given"] = GIVEN


def pytest_configure(config: pytest.Config) -> None:
    """In such a process: what its controller was given."""
    from tests.support import reaper, session_limit

    GIVEN.update(getattr(config, "workerinput", {}).get("given", {}))
    is_worker = hasattr(config, "workerinput")
    reaper.start(runs_tests=is_worker or config.getoption("dist", "no") == "no")
    session_limit.install(config)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Give a test more time on a busy machine, as its deadlines have."""
    import pytest_timeout

    factor = wait.Deadline(settings.timeout).factor
    grown = settings._replace(timeout=settings.timeout * factor)
    return pytest_timeout.pytest_timeout_set_timer(item, grown)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add each failure to the file that QW_TEST_FAILURES names, for `.ci/rerun.py`."""
    path = os.environ.get("QW_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as told:
            line = {"test": report.nodeid, "traceback": report.longreprtext}
            told.write(json.dumps(line) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of `-n`: each process has a part of the tests, and takes of others'."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without the garbage collector, which would walk what stays over and over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which each test is left out."""
    return True if _is_left_out(collection_path, config) else None


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    """Return whether each test of a file is slow, and nobody asked for one of its folder."""
    place = path.relative_to(UNIT.parent.parent).as_posix()
    if not place.startswith((*WAITING, BROWSER)) or place.startswith(QUICK):
        return False
    given = [Path(config.invocation_params.dir, each.split("::")[0]) for each in config.args]
    asked = any(path.parent in (each, *each.parents) for each in given)
    return config.option.markexpr == "not slow" and not asked


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, refuse unit tests that ask for a database, order what `-n` hands out."""
    for item in items:
        if item.nodeid.startswith(WAITING) and not item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(BROWSER):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)
        place = item.path.relative_to(UNIT.parent)
        if place.as_posix() in NEEDS or place.parts[0] in NEEDS:
            item.add_marker(pytest.mark.dev)
        if _property(item) is not None:
            item.add_marker(pytest.mark.property)
        asked = DATABASE_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if asked and UNIT in item.path.parents:
            raise pytest.UsageError(
                f"{item.nodeid} asks for {', '.join(sorted(asked))}: no unit test"
            )
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    longest = [item for item in items if item.nodeid.startswith(LONGEST)]
    others = [item for item in items if not item.nodeid.startswith(LONGEST)]
    waiting = [item for item in others if item.nodeid.startswith(WAITING)]
    busy = [item for item in others if not item.nodeid.startswith(WAITING)]
    # Evenly mixed: some processes of `-n` wait while the others use the processor.
    placed = [(n / len(part), item) for part in (waiting, busy) for n, item in enumerate(part)]
    mixed = iter([item for _, item in sorted(placed, key=lambda each: each[0])])
    # xdist gives each process an equal part of the list: each begins with some of the longest.
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    size = -(-len(items) // count)
    parts = [longest[number::count] for number in range(count)]
    for part in parts:
        part += itertools.islice(mixed, size - len(part))
    items[:] = [item for part in parts for item in part]


def _property(item: pytest.Item) -> Any:
    """Return the handle by which hypothesis lets a plugin replace what it calls; None without."""
    return getattr(getattr(item, "obj", None), "hypothesis", None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Measure the machine; bound the time of random examples. Parameters share the function."""
    wait.measure()
    if (handle := _property(item)) is not None:
        given = handle.inner_test
        handle.inner_test = examples.within_budget(getattr(given, "unlimited", given))


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: no collection has to walk them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_modules(request: pytest.FixtureRequest) -> Generator[None]:
    """Let modules that a test imports from its own folder end with it: the next has other ones."""
    own = "tmp_path" in request.fixturenames
    folder = str(request.getfixturevalue("tmp_path")) if own else None
    yield
    if folder is None:
        return
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def clean_process() -> Generator[None]:
    """Defaults and no variable of ours before each test; a thread that outlives it fails it."""
    kept = process_state.forget_environment()
    process_state.reset()
    # Nothing that a test runs leaves files in the data folder of the person here.
    state = Path(tempfile.gettempdir(), "state")  # in the folder of this process: `reaper`
    os.environ["QUEUE_WORKFLOWS_OUTPUTS_DIR"] = str(state.with_name("outputs"))
    os.environ["STATE_DIRECTORY"] = str(state)
    # `up` and `serve` start a second sooner without it; tests of the dashboard ask for it.
    os.environ["QUEUE_WORKFLOWS_APP_DASHBOARD"] = "0"
    before = set(threading.enumerate())
    logs = process_state.what_is_logged()
    yield
    # A note that a worker left would be reported by every worker of every later test.
    shutil.rmtree(state, ignore_errors=True)
    assert process_state.what_is_logged() == logs, (
        "the test changed what is logged (level, disabled loggers)"
    )
    process_state.forget_environment()
    os.environ.update(kept)
    config.reset_for_tests()
    left = [thread for thread in threading.enumerate() if thread not in before]
    deadline = time.monotonic() + (wait.patience(THREAD_GRACE_S) if left else 0.0)
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    if names := sorted(thread.name for thread in left if thread.is_alive()):
        pytest.fail(f"threads outlived the test: {', '.join(names)}", pytrace=False)


@pytest.fixture(scope="session")
def own_database() -> Generator[Database]:
    """The run's own database with the schema in it; no PostgreSQL is a failure, never a skip."""
    from tests.support import database, reused_backends

    with ExitStack() as stack:
        given = GIVEN.get("QUEUE_WORKFLOWS_TEST_DB_URL")
        part = os.environ.get("PYTEST_XDIST_WORKER", "")
        if given:
            url = database.forced(given, part)
        else:
            url = stack.enter_context(database.throw_away_server())
        own = stack.enter_context(database.Database(url))
        own.migrate()
        reused_backends.shared.install()
        reused_backends.shared.database = own.name
        yield own
        reused_backends.shared.stop()


@pytest.fixture(scope="session")
def dsn(own_database: Database) -> str:
    """The test database's DSN, a URL."""
    return own_database.dsn


@pytest.fixture
def db(
    own_database: Database, clean_process: None, monkeypatch: pytest.MonkeyPatch
) -> Generator[ModuleType]:
    """`queue_workflows.db` on an empty database; a connection that outlives the test fails it."""
    from queue_workflows import db

    if own_database.is_used():
        own_database.empty()
        pytest.fail("an earlier test left rows here: it needs another database", pytrace=False)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", own_database.dsn)
    before = own_database.backends()
    yield db
    db.close_pool()
    left = own_database.left_over(before)
    own_database.empty()
    if left:
        pytest.fail(f"connections outlived the test: {', '.join(map(str, left))}", pytrace=False)


@pytest.fixture
def conn(db: ModuleType) -> Generator[Connection]:
    """An own connection to the test's database, in autocommit mode."""
    with db.connect() as own:
        yield own


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts commands whose DSN is the test database; none outlives the test."""
    from tests.support import commands

    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield made


@pytest.fixture
def slack_s() -> float:
    """Return for how long `invariants_hold` lets a transaction be open; folders have their own."""
    return 30.0


@pytest.fixture
def invariants_hold(db: ModuleType, slack_s: float) -> Generator[None]:
    """Check the invariants at the end of the test, when its processes have ended."""
    from tests.support import invariants

    yield
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=slack_s) == []


@pytest.fixture
def slot_tasks(invariants_hold: None) -> None:
    """Tasks and nodes of `slot_app` may be queued from here; the invariants hold at the end."""
    from tests.support import slot_app

    slot_app.setup()


@pytest.fixture
def step_tasks(invariants_hold: None) -> None:
    """Tasks and nodes of `step_app` may be queued from here; the invariants hold at the end."""
    from tests.support import step_app

    step_app.setup()


@pytest.fixture
def wire(db: ModuleType, dsn: str) -> Generator[Proxy]:
    """A proxy before the test's database that the test can freeze, mute or cut."""
    from tests.support.proxy import Proxy

    with Proxy(dsn) as made:
        yield made


@pytest.fixture
def heard(db: ModuleType) -> Generator[Callable[[], list[tuple[str, str]]]]:
    """Return (channel, payload) of the notifications since the last call."""
    from tests.support.notifications import NotificationListener

    listener = NotificationListener()
    yield listener.heard
    listener.close()


@pytest.fixture
def toy(db: ModuleType) -> Generator[Flow]:
    """An app with workflows that the test declares."""
    from tests.support.flow import Flow

    made = Flow()
    yield made
    made.close()


@pytest.fixture
def fresh_database(own_database: Database) -> Generator[str]:
    """The DSN of a new, empty database on the same server, dropped afterwards."""
    name = own_database.fresh_name()
    yield own_database.create(name)
    own_database.drop(name)


@pytest.fixture
def migrated_database(own_database: Database) -> Generator[str]:
    """Return the DSN of a new database with the schema on the same server; drop it afterwards."""
    name = own_database.fresh_name()
    yield own_database.create_migrated(name)
    own_database.drop(name)
