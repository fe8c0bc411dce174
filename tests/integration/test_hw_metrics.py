"""Samples in the database: notified, stored in rings, one sampler per machine, read back."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import claim_worker, history, hw_metrics, workers
from tests.support import console, factories, tabled, transitions, wait
from tests.support.proxy import Proxy

Row = dict[str, Any]
SAMPLE: Row = {
    "cpu_percent": 97.5, "cpu_ours_percent": None, "ram_percent": 98.0, "ram_used_mb": 64512,
    "ram_total_mb": 65536, "ram_ours_used_mb": None, "ram_ours_percent": None, "swap_used_mb": 2048,
    "gpus": [{"id": 0, "use_pct": 0.0, "vram_used_mb": 24474, "vram_total_mb": 24576}],
}  # fmt: skip
IN_A_LINE = "cpu 98 %, ram 63.0/64.0 GB, swap 2.0 GB, gpus 0 % 23.9/24.0 GB"


class Probe:
    """Takes the same sample each time."""

    def __init__(self) -> None:
        self.closed = False

    def sample(self) -> Row:
        return dict(SAMPLE)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling as usual, but for its pace."""
    monkeypatch.setattr(hw_metrics, "SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr(hw_metrics, "NOTIFY_EVERY_S", 0.05)
    monkeypatch.setattr(hw_metrics, "FOLD_EVERY_S", 0.05)


class Heard:
    """What was notified on the channel."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._conn.execute("LISTEN hw_metrics")

    def next(self, timeout_s: float = 20) -> str:
        for note in self._conn.notifies(timeout=timeout_s, stop_after=1):
            return note.payload
        raise AssertionError("no sample was published")


@pytest.fixture
def heard(db: ModuleType) -> Iterator[Heard]:
    with db.connect() as own:
        yield Heard(own)


def put(conn: Any, *, every_s: int = 2, age_s: float = 0, host: str = "box", **more: Any) -> None:
    """A sample of some time ago, in a slot of its own."""
    conn.execute(
        "INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)"
        " SELECT %s, %s, count(*), now() - %s * interval '1 second', %s FROM hw_samples",
        (host, every_s, age_s, json.dumps(SAMPLE | more)),
    )


# --- notified and stored


def test_a_notification_has_the_keys_of_the_contract_and_the_databases_time(
    conn: Any, heard: Heard
) -> None:
    transitions.store_sample(conn, "box", None, SAMPLE, notify=True)
    published = json.loads(heard.next())
    at = datetime.fromisoformat(published.pop("sampled_at"))
    assert at.utcoffset() == timedelta(0)
    assert abs(factories.one(conn, "SELECT now()") - at) < timedelta(minutes=1)
    assert published == {"host": "box"} | SAMPLE
    assert factories.one(conn, "SELECT count(*) FROM hw_samples") == 0


@pytest.mark.parametrize("host", ["box", "ü" * 200, '"' * 400, "\x01" * 400])
def test_a_notification_stays_under_postgresqls_limit(conn: Any, heard: Heard, host: str) -> None:
    card = {"id": 1000, "use_pct": 100.0, "vram_used_mb": 10**6, "vram_total_mb": 10**6}
    sample = hw_metrics.fit(SAMPLE | {"gpus": [card] * 500})
    transitions.store_sample(conn, host, 2, sample, notify=True)
    payload = heard.next()
    assert 5000 < len(payload.encode()) < 8000
    published = json.loads(payload)
    assert len(published["gpus"]) + published["gpus_cut"] == 500


def test_the_oldest_sample_is_overwritten_so_that_a_ring_never_grows(conn: Any) -> None:
    conn.execute(
        "INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)"
        " SELECT 'box', 2, n, now() - interval '1 hour', '{}' FROM generate_series(0, 1799) n"
    )
    transitions.store_sample(conn, "box", 2, SAMPLE)
    transitions.store_sample(conn, "box", 60, SAMPLE)
    rows = conn.execute(
        "SELECT every_s, count(*) AS n, count(*) FILTER (WHERE sample <> '{}') AS fresh"
        " FROM hw_samples GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert rows == [{"every_s": 2, "n": 1800, "fresh": 1}, {"every_s": 60, "n": 1, "fresh": 1}]


def test_an_overwritten_slot_touches_no_index(conn: Any) -> None:
    def counts() -> tuple[int, int]:
        """Return the updates of the server process that its statistics do not have yet."""
        row = conn.execute(
            "SELECT n_tup_upd AS updated, n_tup_hot_upd AS hot FROM pg_stat_xact_user_tables"
            " WHERE relname = 'hw_samples'"
        ).fetchone()
        assert row is not None
        return row["updated"], row["hot"]

    with conn.transaction():
        conn.execute(
            "INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)"
            " SELECT 'box', 60, n, now() - interval '1 day', '{}' FROM generate_series(0, 1439) n"
        )
        updated, hot = counts()
        transitions.store_sample(conn, "box", 60, SAMPLE)
        assert counts() == (updated + 1, hot + 1)


def lock_file(folder: Path) -> Path:
    """Return where a sampler of host `box` has its lock file; there is none any more."""
    with hw_metrics.Sampler("box", probe=Probe, folder=folder) as subject:
        wait.until(lambda: subject.holds)
        (path,) = folder.glob("*.lock")
    path.unlink(missing_ok=True)
    return path


def test_a_sampler_notifies_and_stores_both_rings(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    woken = threading.Event()
    kept: list[hw_metrics.PendingSample] = []
    with hw_metrics.Sampler("box", ready=woken.set, probe=Probe, folder=tmp_path) as subject:
        wait.until(
            lambda: kept.extend(subject.take()) or {k.every_s for k in kept} == {None, 2, 60}
        )
    assert woken.is_set()
    assert all(each.tell == (each.every_s is None) for each in kept)
    assert all(json.loads(each.text) == SAMPLE for each in kept)


def test_one_sampler_per_machine_and_another_takes_over(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    def sampler(host: str = "box") -> hw_metrics.Sampler:
        return hw_metrics.Sampler(host, probe=Probe, folder=tmp_path)

    with sampler() as second, sampler("other") as other:
        with sampler() as first:
            wait.until(lambda: first.holds or second.holds)
            wait.until(lambda: other.holds)
            assert first.holds != second.holds
            holder, waits = (first, second) if first.holds else (second, first)
            wait.until(holder.take)
            assert waits.take() == []
        wait.until(lambda: second.holds)
        wait.until(second.take)


def test_a_lock_file_that_was_deleted_is_created_again(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    with hw_metrics.Sampler("box", probe=Probe, folder=tmp_path) as subject:
        wait.until(lambda: subject.holds)
        (path,) = tmp_path.glob("*.lock")
        path.unlink()
        wait.until(path.exists)
        wait.until(lambda: subject.take() and subject.holds)


def test_a_sampler_that_lost_its_lock_notifies_nothing_more(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    probe = Probe()
    subject = hw_metrics.Sampler("box", probe=lambda: probe, folder=tmp_path)
    tasks = (subject._sample, subject._sample, subject._notify, subject._fold)
    for task in tasks:
        task()
    assert len(subject.take()) == 3
    (path,) = tmp_path.glob("*.lock")
    taken = tmp_path / "taken"
    with taken.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        taken.rename(path)
        for task in tasks:
            task()
        assert (subject.take(), subject.holds, probe.closed) == ([], False, True)
    for task in tasks:
        task()
    assert len(subject.take()) == 3, "who had it went away"
    subject.__exit__()


def test_where_no_lock_can_be_had_nobody_samples(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    path = lock_file(tmp_path)
    path.symlink_to(tmp_path / "elsewhere")
    with hw_metrics.Sampler("box", probe=Probe, folder=tmp_path) as subject:
        assert not subject.holds
    assert not (tmp_path / "elsewhere").exists()


def test_a_fifo_in_the_place_of_the_lock_blocks_nobody(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    os.mkfifo(lock_file(tmp_path))
    with hw_metrics.Sampler("box", probe=Probe, folder=tmp_path) as subject:
        wait.until(subject.take)


def test_samples_that_nobody_takes_do_not_pile_up(
    db: ModuleType, fast: None, tmp_path: Path
) -> None:
    rounds: list[int] = []
    with hw_metrics.Sampler(
        "box", ready=lambda: rounds.append(1), probe=Probe, folder=tmp_path
    ) as subject:
        wait.until(lambda: len(rounds) > 3 * hw_metrics.WAITING)
        assert len(subject.take()) <= hw_metrics.WAITING


# --- by a gpu worker


@pytest.fixture
def gpu(
    db: ModuleType, fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], claim_worker.ClaimWorker]]:
    """Starts gpu workers whose probe is a fake; they stop at the end."""
    monkeypatch.setattr(hw_metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(hw_metrics, "Probe", Probe)
    started: list[tuple[claim_worker.ClaimWorker, threading.Thread]] = []

    def start() -> claim_worker.ClaimWorker:
        worker = claim_worker.ClaimWorker(queue="gpu", host="box", on_exit=lambda _: None)
        thread = threading.Thread(target=worker.run_forever, name="test-worker")
        thread.start()
        started.append((worker, thread))
        return worker

    yield start
    for worker, thread in started:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_a_gpu_worker_samples_its_machine_also_while_it_is_parked(
    gpu: Any, conn: Any, heard: Heard
) -> None:
    workers.disable("box", "gpu", stop_policy="drain")
    gpu()
    assert json.loads(heard.next())["host"] == "box"
    # Its first sample may come before its row.
    wait.until(
        lambda: factories.one(conn, "SELECT count(*) FROM workers WHERE state = 'parked'") == 1
    )
    conn.execute("DELETE FROM hw_samples")
    wait.until(lambda: {row["every_s"] for row in hw_metrics.look_back("box")} == {2})


def test_of_an_outage_the_latest_samples_are_notified_alone(
    gpu: Any, heard: Heard, wire: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    class Counting(Probe):
        def sample(self) -> Row:
            taken.append(len(taken))
            return SAMPLE | {"swap_used_mb": taken[-1]}

    def next_one() -> int:
        return json.loads(heard.next())["swap_used_mb"]

    monkeypatch.setattr(hw_metrics, "Probe", Counting)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", wire.dsn)
    gpu()
    next_one()
    wire.freeze()
    began = len(taken)
    wait.until(lambda: len(taken) > began + 200)  # about 80 notifications
    over = len(taken)
    wire.thaw()
    late = list[int]()
    while (number := next_one()) < over:
        late += [number] if number > began else []
    assert len(late) <= 2 * hw_metrics.WAITING


def test_telemetry_can_be_switched_off(
    gpu: Any, conn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DISABLE_HW_METRICS", "1")
    gpu()
    wait.until(lambda: factories.one(conn, "SELECT count(*) FROM workers") == 1)
    assert not list(tmp_path.glob("*.lock"))


# --- past samples


def test_past_samples_are_fine_for_an_hour_and_coarse_before(conn: Any) -> None:
    for age_s in (9000, 8940, 400):
        put(conn, every_s=60, age_s=age_s)
    for age_s in (1000, 401, 100):
        put(conn, age_s=age_s)
    put(conn, age_s=100, host="other")
    rows = hw_metrics.look_back("box", past_s=86400)
    assert [row["every_s"] for row in rows] == [60, 60, 2, 2, 2]
    assert rows[0]["gpus"] == SAMPLE["gpus"]
    assert [row["every_s"] for row in hw_metrics.look_back("box", past_s=700)] == [2, 2]
    until = datetime.now(timezone.utc) - timedelta(hours=2)
    assert len(hw_metrics.look_back("box", since=until - timedelta(hours=1), until=until)) == 2


def test_samples_are_pruned_after_a_day(conn: Any) -> None:
    put(conn, age_s=86300)
    put(conn, age_s=86500)
    put(conn, every_s=60, age_s=86500)
    assert history.prune()["hw_samples"] == 2
    assert factories.one(conn, "SELECT count(*) FROM hw_samples") == 1


def died(conn: Any, event: str = "death") -> str:
    """A job of host `box` that was claimed 400 s ago, and died 100 s ago."""
    factories.node(conn)
    job_id = transitions.claim_node(conn, transitions.who(host="box"))["id"]
    conn.execute(
        "UPDATE workflow_node_events SET created_at = now() - interval '400 s' WHERE job_id = %s",
        (job_id,),
    )
    run_id = factories.one(conn, "SELECT run_id FROM workflow_node_jobs")
    for kind, age_s in ((event, 101), ("reclaimed", 100)):
        conn.execute(
            "INSERT INTO workflow_node_events (run_id, node_id, job_id, claim_no, event_type,"
            " created_at) VALUES (%s, 'n', %s, 1, %s, now() - %s * interval '1 second')",
            (run_id, job_id, kind, age_s),
        )
    return job_id


def test_an_attempt_that_died_shows_the_last_sample_of_its_machine(conn: Any) -> None:
    job_id = died(conn)
    for age_s, cpu in ((500, 1.0), (300, 2.0), (200, 97.5), (20, 3.0)):
        put(conn, age_s=age_s, cpu_percent=cpu)
    shown = history.get_job(job_id)
    assert shown is not None
    (attempt,) = shown["attempts"]
    machine = attempt["machine"]
    assert machine["cpu_percent"] == 97.5
    assert attempt["claimed_at"] < machine["sampled_at"] < attempt["ended_at"]


def test_an_attempt_that_ended_well_shows_no_sample(conn: Any) -> None:
    factories.node(conn)
    job = transitions.claim_node(conn)
    put(conn)
    transitions.complete_node(conn, job)
    shown = history.get_job(job["id"])
    assert shown is not None
    assert [attempt["machine"] for attempt in shown["attempts"]] == [None]


# --- the command


def test_show_prints_the_sample_of_the_machine_when_a_job_died(conn: Any) -> None:
    job_id = died(conn)
    put(conn, age_s=200)
    code, out, _ = console.command("show", job_id)
    assert code == 0
    assert f"its machine: {IN_A_LINE}" in out


def test_samples_of_a_machine_as_a_table_and_as_json(conn: Any) -> None:
    for age_s in range(2, 92, 2):
        put(conn, age_s=age_s)
    code, out, _ = console.command("samples", "--host", "box")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["UTC", "cpu"]
    assert len(lines) == 1 + 23, "45 samples, two to a line"
    assert "63.0/64.0 GB" in lines[1] and "0 % 23.9/24.0 GB" in lines[1]
    assert len(console.command("samples", "--host", "box", "--full")[1].splitlines()) == 46
    _, out, _ = console.command("samples", "--host", "box", "--past", "45s", "--json")
    assert 0 < len(json.loads(out)) < 23


def test_samples_of_the_machine_of_a_job_end_with_the_job(conn: Any) -> None:
    job_id = died(conn)
    for age_s in (900, 300, 200, 20):
        put(conn, age_s=age_s)
    code, out, _ = console.command("samples", "--job", job_id[:8], "--json")
    assert (code, len(json.loads(out))) == (0, 2)


def test_a_sample_of_this_machine_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, _ = console.command("samples", "--now", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["sample"]["gpus"] == []
    assert found["gpus_by"] in ("none", "nvml")
    assert 0 <= found["cost"]["cpu_s"] < 1
    assert "a sample costs" in console.command("samples", "--now")[1]


def test_samples_that_are_not_there_yet_say_who_takes_them(conn: Any) -> None:
    assert console.refusal("samples", "--host", "box") == (
        "queue-workflows samples: host 'box' has no samples from then, nor has another host;"
        " a worker takes them, unless DISABLE_HW_METRICS is set\n"
    )
    run_id = factories.run(conn)
    assert f"--job {run_id} is a run; `queue-workflows show {run_id}` shows its jobs" in (
        console.refusal("samples", "--job", run_id)
    )


def test_what_cannot_be_shown_is_a_line_and_exit_code_2(conn: Any) -> None:
    cases: list[Any] = [
        (("--host", "nowhere"), "host 'nowhere' has no samples from then; there are some of box"),
        (("--host", "box2"), "there are some of box; did you mean 'box'?"),
        (("--host", "\udcff"), "host '\\udcff'"),
        (("--past", "soon"), "--past soon should be a time span"),
        (("--past", "2d"), "--past 2d should be a time span"),
        (("--past", "nan"), "--past nan"),
    ]
    for argv, reason in cases:
        with tabled.case(argv, reason):
            put(conn)
            code, out, err = console.command("samples", *argv)
            assert (code, out) == (2, "")
            assert reason in err.splitlines()[-1]


# --- the first worker of a machine


def test_the_first_worker_of_a_machine_samples_it_whatever_its_queue(
    conn: Any, heard: Heard, fast: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hw_metrics, "Probe", WithoutGpu)
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    thread = threading.Thread(target=worker.run_forever)
    thread.start()
    try:
        published = json.loads(heard.next())
        wait.until(lambda: factories.one(conn, "SELECT count(*) FROM hw_samples"))
    finally:
        worker.stop()
        thread.join()
    assert (published["host"], published["gpus"]) == ("box", [])
    # A machine without a GPU leaves a row a minute, and none every two seconds.
    assert factories.column(conn, "SELECT DISTINCT every_s FROM hw_samples") == [60]


class WithoutGpu:
    """The probe of a machine without a GPU."""

    def sample(self) -> Row:
        return SAMPLE | {"gpus": []}

    def close(self) -> None:
        pass
