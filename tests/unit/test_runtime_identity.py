"""Worker ids: readable, unique, within the column."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from queue_workflows.runtime import identity
from queue_workflows.tasks import job_validation


def test_boot_id_is_the_kernels() -> None:
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        pytest.skip("no boot id here")
    assert identity.boot_id() == path.read_text().strip()


def test_without_a_boot_id_the_host_name_gives_a_stable_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "missing")
    first, second = (identity.boot_id.__wrapped__() for _ in range(2))
    assert first == second
    assert re.fullmatch("[0-9a-f]{32}", first)


def test_a_worker_id_names_label_pid_and_machine_and_is_never_given_twice() -> None:
    first, second = identity.new_worker_id("box-1"), identity.new_worker_id("box-1")
    label, pid, machine, rest = first.split(":")
    assert (label, int(pid), machine) == ("box-1", os.getpid(), identity.machine())
    assert len(rest) == 12
    assert first != second


def test_a_worker_id_shows_whether_handlers_run_in_other_processes() -> None:
    own, others = (identity.new_worker_id("x" * 500, executors=each) for each in (False, True))
    assert not identity.has_executors(own)
    assert identity.has_executors(others)
    assert not identity.has_executors("x")
    assert others.startswith(identity.process_prefix("x" * 500, os.getpid()))
    assert len(others) <= 120


def test_the_prefix_is_that_of_one_process() -> None:
    prefix = identity.process_prefix("box 1", os.getpid())
    assert identity.new_worker_id("box 1").startswith(prefix)
    assert not identity.new_worker_id("box 1").startswith(identity.process_prefix("box 1", 1))


def test_containers_of_one_boot_are_different_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = identity.machine.__wrapped__()
    other = tmp_path / "pid"
    other.touch()
    monkeypatch.setattr(identity, "_PID_NAMESPACE", other)
    there = identity.machine.__wrapped__()
    assert re.fullmatch("[0-9a-f]{8}", there)
    assert there != here


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("a:b c\nd\x00e", "a-b-c-d-e"),
        ("Ünïcode", "-n-code"),
        ("", "host"),
        ("x" * 500, "x" * 80),
    ],
)
def test_a_label_cannot_break_the_form_or_the_length(label: str, shown: str) -> None:
    worker_id = identity.new_worker_id(label)
    assert worker_id.split(":")[0] == shown
    assert worker_id.count(":") == 3
    assert len(worker_id) <= 120


def test_ids_of_new_jobs_are_uuids_of_version_8_that_follow_one_another() -> None:
    prefix = job_validation.new_job_prefix()
    ids = job_validation.job_ids(prefix, 300)
    parsed = [uuid.UUID(job_id) for job_id in ids]
    assert {(one.version, one.variant) for one in parsed} == {(8, uuid.RFC_4122)}
    assert [str(one) for one in parsed] == ids == sorted(ids)
    assert [int(job_id.removeprefix(prefix), 16) for job_id in ids] == list(range(1, 301))
    assert len({job_validation.new_job_prefix() for _ in range(100)}) == 100


def test_a_process_exists_until_it_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.process_exists(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        assert identity.process_exists(ended.pid)
    assert not identity.process_exists(ended.pid)

    def of_another_user(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", of_another_user)
    assert identity.process_exists(1)
