"""The embedded server's databases: one per project, with real commands in real folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from queue_workflows import embedded
from tests.support import commands, database, embedded_servers, reaper
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = """
import queue_workflows

def setup():
    queue_workflows.register_node("{name}", lambda: dict(app="{name}"))
    step = dict(id="s", kind="pipeline", pipeline="p")
    queue_workflows.set_workflow_provider(
        dict({name}=dict(name="{name}", steps=[step])).__getitem__,
        dict(p=dict(nodes=[dict(id="n", node="{name}")])).__getitem__,
    )
"""


@pytest.fixture(scope="module")
def base() -> Generator[Path]:
    """Two projects, `one` and `two`, and one server that runs as long as this module's tests."""
    base = Path(tempfile.mkdtemp(prefix="qw-projects-"))
    reaper.own(base)
    base.chmod(0o711)  # as root the server runs under another account, which has to pass
    for name in ("one", "two", "twins"):
        (base / name / "sub").mkdir(parents=True)
        (base / name / f"{name}_app.py").write_text(APP.format(name=name))
    (base / "twins" / "second_app.py").write_text(APP.format(name="second"))
    try:
        unsafe = {"fsync": "off", "full_page_writes": "off"}
        with database.environment(QUEUE_WORKFLOWS_EMBEDDED_DIR=str(base / "pg")):
            server = embedded.ensure(settings=unsafe)
        with server:
            yield base
        assert not embedded_servers.is_alive(base / "pg")
    finally:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def cli(base: Path) -> Generator[Commands]:
    environment = {"QUEUE_WORKFLOWS_EMBEDDED_DIR": str(base / "pg"), "WORKFLOW_CPU_WORKERS": "1"}
    with commands.commands(**environment) as made:
        yield made


def run(cli: Commands, cwd: Path, name: str, *more: str) -> dict[str, Any]:
    """What `run` printed of a run of the app `<name>_app`, which is in the current folder."""
    argv = ("queue-workflows", "run", name, "--app", f"{name}_app:setup", "--json", *more)
    done = cli.run(*argv, cwd=cwd, timeout_s=60)
    assert done.process.returncode == 0, done.err
    return json.loads(done.out)


def up(cli: Commands, cwd: Path, name: str, *more: str) -> Command:
    """An `up` of the app that has started its processes."""
    argv = ("queue-workflows", "up", "--app", f"{name}_app:setup", "--cpu", "1", *more)
    started = cli.start(*argv, cwd=cwd)
    until(lambda: "starting orchestrator" in started.err, timeout_s=30)
    return started


def runs(cli: Commands, cwd: Path, *more: str) -> set[str]:
    """The ids that `runs` lists."""
    done = cli.run("queue-workflows", "runs", "--json", *more, cwd=cwd)
    assert done.process.returncode == 0, done.err
    return {row["id"] for row in json.loads(done.out)}


def listed(cli: Commands) -> dict[str, dict[str, Any]]:
    """Return the databases by the last part of their folder, all without one here by their name."""
    rows = json.loads(cli.run("queue-workflows", "databases", "--json").out)
    # The demo's folder is the package's, whose name is that of the cluster's own database.
    return {_key(row): row for row in rows}


def _key(row: dict[str, Any]) -> str:
    folder = row["folder"] or ""
    return Path(folder).name if "qw-projects" in folder else row["database"]


def test_two_projects_have_two_databases_that_are_found_from_their_folders(
    cli: Commands, base: Path
) -> None:
    first = run(cli, base / "one", "one")["id"]
    second = run(cli, base / "two", "two")["id"]
    found = listed(cli)
    assert found["one"]["folder"] == str(base / "one")
    assert found["one"]["database"] != found["two"]["database"]
    assert found["one"]["unfinished_runs"] == 0
    assert first in runs(cli, base / "one") and second not in runs(cli, base / "one")
    below = runs(cli, base / "two" / "sub")
    assert second in below and first not in below, "runs of other tests may be there too"
    # Started from below, found by PYTHONPATH: the same app has the same database.
    app = ("--app", "one_app:setup")
    done = cli.run(
        "queue-workflows", "runs", "--json", *app, cwd=base / "two", PYTHONPATH=str(base / "one")
    )
    assert first in {row["id"] for row in json.loads(done.out)}
    assert runs(cli, base, "--db", found["two"]["database"]) == below


def test_outside_of_every_project_the_databases_are_named(cli: Commands, base: Path) -> None:
    run(cli, base / "one", "one")
    line = commands.refused(cli.run("queue-workflows", "runs", cwd=base))
    assert f"no database of the project in {base}," in line
    assert listed(cli)["one"]["database"] in line and "--app" in line and "--db" in line
    line = commands.refused(cli.run("queue-workflows", "runs", "--db", "none", cwd=base / "one"))
    assert "no database 'none'" in line
    line = commands.refused(cli.run("queue-workflows", "runs", "--db", "a b", cwd=base / "one"))
    assert "is not a valid database name" in line


def test_up_of_different_apps_do_not_meet(cli: Commands, base: Path) -> None:
    first, second = up(cli, base / "one", "one"), up(cli, base / "two", "two")
    made = {name: run(cli, base / name, name) for name in ("one", "two")}
    assert {name: found["status"] for name, found in made.items()} == {
        "one": "completed", "two": "completed",
    }  # fmt: skip
    ups = {name: [each["pid"] for each in row["up"]] for name, row in listed(cli).items()}
    assert (ups["one"], ups["two"]) == ([first.process.pid], [second.process.pid])
    for each in (first, second):
        each.send(signal.SIGINT)
        assert each.wait() == 0, each.err
    assert [row["up"] for row in listed(cli).values()] == [[]] * len(ups)


def test_a_second_up_of_an_app_names_the_first(cli: Commands, base: Path) -> None:
    first = up(cli, base / "one", "one")
    again = ("queue-workflows", "up", "--app", "one_app:setup")
    line = commands.refused(cli.run(*again, cwd=base / "one"))
    assert f"one_app:setup runs already: `queue-workflows up` with pid {first.process.pid}," in line
    # `--db` with its name gives the same database, and so the same app.
    name = listed(cli)["one"]["database"]
    assert "runs already" in commands.refused(cli.run(*again, "--db", name, cwd=base / "one"))
    # A killed process cannot deregister.
    os.kill(first.process.pid, signal.SIGKILL)
    until(lambda: not first.family())
    assert listed(cli)["one"]["up"] == []
    third = up(cli, base / "one", "one")
    third.send(signal.SIGINT)
    assert third.wait() == 0, third.err


def test_a_run_says_that_up_serves_older_code(cli: Commands, base: Path) -> None:
    app = base / "one" / "one_app.py"
    first = up(cli, base / "one", "one")
    argv = ("queue-workflows", "run", "one", "--app", "one_app:setup")
    assert "older code" not in cli.run(*argv, cwd=base / "one", timeout_s=60).err
    app.write_text(app.read_text() + "# edited\n")
    for more in ((), ("--no-up",), ("--no-wait",)):
        done = cli.run(*argv, *more, cwd=base / "one", timeout_s=60)
        assert done.process.returncode == 0, done.err
        (line,) = [line for line in done.err.splitlines() if "older code" in line]
        assert f"with pid {first.process.pid} runs older code" in line
        assert "start it again" in line and "--reload" in line
    first.send(signal.SIGINT)
    assert first.wait() == 0, first.err


def test_up_with_reload_starts_again_with_the_edited_app(cli: Commands, base: Path) -> None:
    (base / "edited").mkdir()
    app = base / "edited" / "edited_app.py"
    app.write_text(APP.format(name="edited"))
    served = up(cli, base / "edited", "edited", "--reload")
    app.write_text("this is no Python")
    until(lambda: "cannot be loaded; going on as before" in served.err, timeout_s=30)
    assert "SyntaxError" in served.err
    app.write_text(APP.format(name="edited").replace('app="', 'app="new '))
    until(lambda: served.err.count("starting orchestrator") == 2, timeout_s=60)
    argv = ("queue-workflows", "run", "edited", "--app", "edited_app:setup", "--no-up", "--json")
    done = cli.run(*argv, cwd=base / "edited", timeout_s=60)
    shown = json.loads(done.out)
    assert (shown["status"], "older code" in done.err) == ("completed", False), done.err
    nodes = cli.run("queue-workflows", "show", "--json", shown["id"], cwd=base / "edited")
    assert '"new edited"' in nodes.out
    served.send(signal.SIGINT)
    assert served.wait() == 0, served.err
    until(lambda: not served.family())


def test_two_apps_of_one_folder_share_a_database_only_on_request(cli: Commands, base: Path) -> None:
    first = up(cli, base / "twins", "twins")
    for argv in (("up",), ("run", "second")):
        command = ("queue-workflows", *argv, "--app", "second_app:setup")
        line = commands.refused(cli.run(*command, cwd=base / "twins"))
        assert f"another app, twins_app:setup with pid {first.process.pid}," in line
        assert "--db" in line
    apart = run(cli, base / "twins", "second", "--db", "apart")
    assert apart["status"] == "completed"
    assert apart["id"] not in runs(cli, base / "twins")
    assert listed(cli)["apart"]["folder"] is None
    shared = up(cli, base / "twins", "second", "--db", listed(cli)["twins"]["database"])
    assert len(listed(cli)["twins"]["up"]) == 2
    for each in (first, shared):
        each.send(signal.SIGINT)
        assert each.wait() == 0, each.err


def test_the_database_that_every_cluster_has_is_listed_once_it_is_used(
    cli: Commands, base: Path
) -> None:
    assert "queue_workflows" not in listed(cli), "nothing is in it"
    made = run(cli, base / "one", "one", "--db", "queue_workflows")["id"]
    assert runs(cli, base, "--db", "queue_workflows") == {made}
    assert listed(cli)["queue_workflows"]["folder"] is None


def test_a_script_and_the_role_scripts_use_the_projects_database(cli: Commands, base: Path) -> None:
    made = run(cli, base / "one", "one")["id"]
    (base / "one" / "reads.py").write_text(
        "import queue_workflows as q\n"
        "q.configure(embedded=True)\n"
        "print([run['id'] for run in q.runs.list()])\n"
        "q.db.close_pool()\n"
    )
    done = cli.run("python", str(base / "one" / "reads.py"), cwd=base)
    assert made in done.out, done.err
    off = ("queue-worker-control", "--queue", "cpu", "--off", "--host", "h")
    assert cli.run(*off, cwd=base / "one" / "sub").process.returncode == 0
    assert "no database of the project" in commands.refused(cli.run(*off, cwd=base))
    messages = cli.run("queue-workflows", "status", cwd=base / "one").out
    assert "h cpu is switched off" in messages
    name = listed(cli)["one"]["database"]
    assert cli.run(*off[:3], "--on", *off[4:], "--db", name, cwd=base).process.returncode == 0
    messages = cli.run("queue-workflows", "status", cwd=base / "one").out
    assert "switched off" not in messages
    role = cli.start("queue-orchestrator", "--db", name, cwd=base)
    until(lambda: f"dispatches on database {name}" in role.err)
    role.send(signal.SIGTERM)
    assert role.wait(30) == 0, role.err
    lost = cli.run(*off, "--db", "nowhere", cwd=base)
    assert "the embedded server has no database 'nowhere': name one of" in commands.refused(lost)
    assert "switched off" not in cli.run("queue-workflows", "status", cwd=base / "two").out


def test_python_uses_the_database_of_its_folder_only_if_the_variable_requests_it(
    cli: Commands, base: Path
) -> None:
    """The tutorial sets the variable; without it a new reader gets the error."""
    made = run(cli, base / "one", "one")["id"]
    code = (
        "import queue_workflows as q\n"
        "print([run['id'] for run in q.runs.list()])\n"
        "q.db.close_pool()\n"
    )
    refused = cli.run("python", "-c", code, cwd=base / "one")
    assert refused.process.returncode == 1
    assert "DatabaseUrlMissing" in refused.err and "QUEUE_WORKFLOWS_EMBEDDED=1" in refused.err
    done = cli.run("python", "-c", code, cwd=base / "one", QUEUE_WORKFLOWS_EMBEDDED="1")
    assert made in done.out, done.err


def test_the_demo_needs_no_server_and_has_a_database_of_its_own(cli: Commands, base: Path) -> None:
    (base / "anywhere").mkdir()
    for _ in range(2):
        demo = cli.run("queue-workflows", "demo", "--yes", cwd=base / "anywhere", timeout_s=60)
        assert demo.process.returncode == 0, demo.err
        until(lambda demo=demo: not demo.family())
        (way_back,) = [line for line in demo.out.splitlines() if line.startswith("what happened: ")]
        command = way_back.removeprefix("what happened: ").split()
        assert command[-2:] == ["--db", "demo"]
        shown = cli.run(*command, cwd=base)
        assert "picture_book" in shown.out, shown.err
    assert [path.name for path in (base / "anywhere").iterdir()] == ["queue-workflows-demo"]
    assert [
        row["unfinished_runs"] for row in listed(cli).values() if row["database"] == "demo"
    ] == [0]


def test_a_database_of_the_embedded_server_and_a_dsn_are_not_both_taken(
    cli: Commands, base: Path
) -> None:
    line = commands.refused(
        cli.run("queue-workflows", "runs", "--db", "x", QUEUE_WORKFLOWS_DB_URL="postgresql:///x")
    )
    assert "--db x names a database of the embedded server" in line


def test_several_starts_at_once_make_one_database(cli: Commands, base: Path) -> None:
    (base / "many").mkdir()
    code = (
        "import queue_workflows as q; q.configure(embedded=True); q.db.bootstrap();"
        "print(q.db.db_url()); q.db.close_pool()"
    )
    started = [cli.start("python", "-c", code, cwd=base / "many") for _ in range(8)]
    assert [each.wait(60) for each in started] == [0] * 8, [each.err for each in started]
    (url,) = {each.out.strip() for each in started}
    with psycopg.connect(url) as conn:
        assert conn.info.dbname == listed(cli)["many"]["database"]
