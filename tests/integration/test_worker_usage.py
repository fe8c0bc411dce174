"""The GPU sampler with tools on PATH that answer, fail, hang, print too much, or are missing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from queue_workflows.runtime import exit_codes, external_tool
from queue_workflows.telemetry import worker_usage
from queue_workflows.worker import gpu_models, guards
from tests.support import constants, timeouts
from tests.support.wait import patience, until

HEADER = "# gpu  pid type sm mem command\n# Idx    #  C/G  %   % name\n"
Write = Callable[[str, str], Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a fake tool that logs its arguments; PATH holds nothing but those."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    tools = f'PATH="{os.defpath}:/usr/bin:/bin"\n'

    def write(name: str, script: str) -> Path:
        path = folder / name
        log = tmp_path / f"{name}.log"
        path.write_text(f'#!/bin/sh\n{tools}echo "$@" >> "{log}"\n{script}\n')
        path.chmod(0o755)
        return log

    return write


def nvidia(pmon: str, box: str = "exit 9") -> str:
    return f'case "$1" in\npmon)\n{pmon}\n;;\n*)\n{box}\n;;\nesac'


def shows(text: str) -> str:
    return f"cat <<'END'\n{text}\nEND"


def showing() -> worker_usage.Sampler:
    """A sampler of a machine whose pmon has shown a number."""
    sampler = worker_usage.Sampler()
    sampler.shown = True
    return sampler


def own(use: str, pid: int | None = None) -> str:
    return shows(f"{HEADER} 0 {pid or os.getpid()} C {use} python")


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_without_tools_the_reading_is_unknown_with_a_reason(tool: Write) -> None:
    sampler = worker_usage.Sampler()
    found = sampler.sample()
    assert found.gpu_pct is None
    assert found.ram_mb is not None
    assert sampler.problem == "no nvidia-smi on PATH, no rocm-smi on PATH"


def test_use_of_own_process(tool: Write) -> None:
    log = tool("nvidia-smi", nvidia(own("62 10"), shows("99 %")))
    sampler = worker_usage.Sampler()
    assert sampler.sample().gpu_pct == 62
    assert sampler.problem is None
    assert log.read_text().splitlines() == ["pmon -c 1"]


def test_use_of_a_child_process(tool: Write) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tool("nvidia-smi", nvidia(own("41 10", child.pid), shows("99 %")))
        assert worker_usage.Sampler().sample().gpu_pct == 41
        child.communicate(b"\n")


def test_a_dash_is_unknown_until_the_machine_has_shown_a_number(tool: Write) -> None:
    sampler = worker_usage.Sampler()
    tool("nvidia-smi", nvidia(own("- -"), shows("99 %")))
    assert sampler.sample().gpu_pct is None
    assert sampler.problem == "pmon has shown no number yet"
    tool("nvidia-smi", nvidia(shows(f"{HEADER} 0 1 C 8 2 other"), shows("8 %")))
    assert sampler.sample().gpu_pct == 8
    tool("nvidia-smi", nvidia(own("- -"), shows("0, 99 %")))
    assert sampler.sample().gpu_pct == 0
    assert worker_usage.Sampler().sample().gpu_pct is None


@pytest.mark.parametrize(
    "pmon",
    [
        shows(f"{HEADER} 0 - - - - -"),
        shows(f"{HEADER} 0 1 C 3 2 other"),
        "exit 3",
        shows("pmon is not supported here"),
        "printf '\\377\\376\\000'",
    ],
)
def test_without_a_row_of_ours_the_whole_machine_counts(tool: Write, pmon: str) -> None:
    log = tool("nvidia-smi", nvidia(pmon, shows("17 %")))
    assert worker_usage.Sampler().sample().gpu_pct == 17
    assert "--query-gpu=utilization.gpu" in log.read_text()


@pytest.mark.parametrize(
    ("cards", "used"),
    [
        ("0, 12 %\n1, [N/A]", 0),
        ("0, [N/A]\n1, 12 %", None),
        ("0, [Not Supported]", None),
        ("1, 12 %", None),
        ("No devices were found", None),
    ],
)
def test_a_dash_of_a_gpu_that_reports_no_use_is_unknown(
    tool: Write, cards: str, used: float | None
) -> None:
    """In MIG mode pmon prints `-` for every process: if another GPU reports, it is not idle."""
    tool("nvidia-smi", nvidia(own("- -"), shows(cards)))
    sampler = showing()
    assert sampler.sample().gpu_pct == used
    assert (sampler.problem is None) == (used is not None)


GENERATIONS = {
    "390": ("# gpu pid type sm mem enc dec command\n# Idx # C/G % % % % name", "C {use} 0 0 0"),
    "470": ("# gpu pid type sm mem enc dec command\n# Idx # C/G % % % % name", "C {use} 0 - -"),
    "535": (
        "# gpu pid type sm mem enc dec jpg ofa command\n# Idx # C/G % % % % % % name",
        "C+G {use} - - - - -",
    ),
    "gi-ci": (
        "# gpu gi ci pid type sm mem command\n# Idx Idx Idx # C/G % % name",
        "C {use} 0",
    ),
    "memory too": (
        "# gpu pid type fb ccpm sm mem command\n# Idx # C/G MB MB % % name",
        "C 9000 - {use} 0",
    ),
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_own_use_by_the_pmon_of_many_drivers(tool: Write, generation: str) -> None:
    header, row = GENERATIONS[generation]
    first = "0 1 2" if " gi " in header else "0"
    for use in (62, 0):
        line = f"{first} {os.getpid()} {row.format(use=use)} my #2 model"
        tool("nvidia-smi", nvidia(shows(f"{header}\n{line}"), shows("0, 99 %")))
        assert showing().sample().gpu_pct == use


@pytest.mark.parametrize(
    ("pmon", "box", "used"),
    [
        # MIG: no process is listed, and no use of the GPU.
        (shows("Process monitoring is not supported when MIG is enabled"), shows("[N/A]"), None),
        (shows(f"{HEADER} 0 - - - - -"), shows("[N/A]\n12 %"), None),
        # Unified memory: the GPU has none of its own, and reports its use.
        (shows(f"{HEADER} 0 - - - - -"), shows("43 %"), 43),
        # A virtual machine's share of a GPU, and Linux on Windows, report nothing.
        ("echo 'Not supported on the device(s)'; exit 3", shows("[N/A]"), None),
        ("echo 'Failed to process command line.'; exit 9", "exit 9", None),
        # A driver that was updated under a running system; a GPU that fell off the bus.
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
         "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", None),
        (shows("Unable to determine the device handle for GPU0: Unknown Error"),
         "echo 'GPU is lost'; exit 15", None),
    ],
)  # fmt: skip
def test_a_machine_with_partial_readings(
    tool: Write, pmon: str, box: str, used: float | None
) -> None:
    tool("nvidia-smi", nvidia(pmon, box))
    assert showing().sample().gpu_pct == used


def test_what_is_not_available_is_unknown(tool: Write) -> None:
    tool("nvidia-smi", nvidia(shows(f"{HEADER} 0 - - - - -"), shows("[N/A]")))
    sampler = worker_usage.Sampler()
    assert sampler.sample().gpu_pct is None
    assert sampler.problem == "nvidia-smi reports no use of the GPU"


def test_without_a_row_of_ours_the_own_gpu_counts(tool: Write) -> None:
    pmon, machine = shows(HEADER), shows("0, 90 %\n1, 3 %\n2, [N/A]")
    log = tool("nvidia-smi", nvidia(pmon, machine))
    used = [worker_usage.Sampler(card=card).sample().gpu_pct for card in (0, 1, 2, 3)]
    assert used == [90.0, 3.0, None, None]
    assert "--query-gpu=index,utilization.gpu" in log.read_text()


def test_rocm_is_asked_for_the_own_gpu(tool: Write) -> None:
    log = tool("rocm-smi", shows('{"card1": {"GPU use (%)": "7"}}'))
    assert worker_usage.Sampler(card=1).sample().gpu_pct == 7.0
    assert log.read_text().split() == ["-d", "1", "--showuse", "--json"]


def test_a_process_that_is_followed_is_sampled_alone(tool: Write) -> None:
    argv = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE) as first,
        subprocess.Popen(argv, stdin=subprocess.PIPE) as second,
    ):
        tool("nvidia-smi", nvidia(own("40 1", first.pid), shows("0 %")))
        sampler = worker_usage.Sampler()
        found: list[float | None] = []
        for pid in (None, first.pid, second.pid):
            sampler.follow(pid)
            found.append(sampler.sample().gpu_pct)
        for each in (first, second):
            each.communicate(b"\n")
    assert found == [40.0, 40.0, 0.0]


@pytest.mark.parametrize("driver", [None, "exit 1"])
def test_rocm_is_read_where_nvidia_does_not_answer(tool: Write, driver: str | None) -> None:
    if driver:
        tool("nvidia-smi", driver)
    tool("rocm-smi", shows('{"card0": {"GPU use (%)": "12"}}'))
    assert worker_usage.Sampler().sample().gpu_pct == 12


def test_tools_that_fail_are_unknown_and_say_how(tool: Write) -> None:
    tool("nvidia-smi", "echo 0; exit 1")
    tool("rocm-smi", "echo 'GPU use (%): 0'; exit 2")
    sampler = worker_usage.Sampler()
    assert sampler.sample().gpu_pct is None
    assert sampler.problem == "nvidia-smi ended with 1, rocm-smi ended with 2"


def test_a_tool_that_hangs_is_given_up_and_killed_with_its_children(
    tool: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "telemetry.worker_usage.TIMEOUT_S", 0.5)
    pids = tmp_path / "pids"
    tool("nvidia-smi", f'sleep 60 &\necho $$ $! > "{pids}"\nwait')
    rocm = tool("rocm-smi", shows('{"card0": {"GPU use (%)": "0"}}'))
    sampler = worker_usage.Sampler()
    started = time.monotonic()
    assert sampler.sample().gpu_pct is None
    assert time.monotonic() - started < patience(2.5)
    assert "did not end within 0.5 s" in str(sampler.problem)
    assert not rocm.exists()
    assert len(pids_in(pids)) == 2
    until(lambda: not any(map(is_alive, pids_in(pids))))


def test_a_tool_that_closes_its_output_and_hangs_is_given_up(
    tool: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "telemetry.worker_usage.TIMEOUT_S", 0.5)
    tool("nvidia-smi", f"{own('9 9')}\nexec >&-\nsleep 60")
    started = time.monotonic()
    assert worker_usage.Sampler().sample().gpu_pct is None
    assert time.monotonic() - started < patience(2.5)


def test_all_that_one_sample_runs_shares_the_time(
    tool: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "telemetry.worker_usage.TIMEOUT_S", 1.0)
    tool("nvidia-smi", nvidia("sleep 0.7; exit 1", "sleep 0.7; exit 1"))
    rocm = tool("rocm-smi", shows('{"card0": {"GPU use (%)": "0"}}'))
    started = time.monotonic()
    assert worker_usage.Sampler().sample().gpu_pct is None
    assert time.monotonic() - started < patience(3.0)
    assert not rocm.exists()


def test_a_flood_is_cut_off(tool: Write) -> None:
    tool("nvidia-smi", "exec cat /dev/zero")
    answer = external_tool.Tool("nvidia-smi").ask(timeout_s=30.0)
    assert answer.text is None
    assert "printed more than" in answer.problem
    assert worker_usage.Sampler().sample().gpu_pct is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/no/such/interpreter\n"])
def test_a_tool_that_cannot_be_started_is_unknown(
    tool: Write, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "bin/nvidia-smi"
    path.write_bytes(content)
    path.chmod(0o755)
    sampler = worker_usage.Sampler()
    assert sampler.sample().gpu_pct is None
    assert "nvidia-smi" in str(sampler.problem)


def test_a_tool_that_cannot_be_killed_is_left_and_not_started_again(
    tool: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    tool("nvidia-smi", f'echo $$ >> "{pids}"\nread line < "{tmp_path}/gate" || :')
    os.mkfifo(tmp_path / "gate")
    kills: list[int] = []
    monkeypatch.setattr(external_tool.os, "killpg", lambda pid, sent: kills.append(pid))
    asked = external_tool.Tool("nvidia-smi")
    assert asked.ask(timeout_s=0.5).hung
    again = asked.ask(timeout_s=0.5)
    assert again.hung
    assert again.problem == "an earlier nvidia-smi still hangs"
    assert pids_in(pids) == kills
    assert len(kills) == 1
    with (tmp_path / "gate").open("w"):
        pass
    until(lambda: not is_alive(kills[0]))
    tool("nvidia-smi", "echo back")
    assert asked.ask(timeout_s=5.0) == ("back\n", "", False)


def test_the_tool_runs_with_the_locale_that_is_parsed(
    tool: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    tool("nvidia-smi", 'echo "$LC_ALL"')
    assert external_tool.Tool("nvidia-smi").ask(timeout_s=5.0).text == "C\n"


def test_a_machine_without_tools_leaves_its_gpu_jobs_to_the_clock(tool: Write) -> None:
    """The sampler and the guard together: unknown is not idle."""
    guard = guards.GpuHealth(0.0, 8100.0)
    found = worker_usage.Sampler().sample()
    for now in range(30, 8100, 30):
        assert guard.wants_sample(now)
        guard.sample(now, found)
        assert guard.check(now) is None
    trip = guard.check(8100.0)
    assert trip is not None
    assert trip.code == exit_codes.BUDGET


def test_the_size_of_the_gpu_memory_is_read_until_it_is_known(
    tool: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.wait_for_gpu_sizes(monkeypatch, 30.0)
    constants.put(monkeypatch, "worker.gpu_models.UNKNOWN_S", 0.01)
    measured = mock.Mock()
    with contextlib.closing(gpu_models.GpuModels(card=None, wake=measured)) as subject:
        subject.serve(mock.Mock(), mock.Mock(), mock.Mock())
        until(lambda: measured.call_count > 1)
        assert subject.report()["columns"]["vram_total_mb"] is None
        tool("nvidia-smi", "echo 0, GPU-aa, 12288")
        until(lambda: subject.report()["columns"]["vram_total_mb"] == 12288)


def test_a_stopped_process_is_known_from_one_that_runs() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        sampler = worker_usage.Sampler()
        sampler.follow(child.pid)
        assert not sampler.is_stopped
        child.send_signal(signal.SIGSTOP)
        until(lambda: sampler.is_stopped)
        child.kill()
    assert not sampler.is_stopped
    assert not worker_usage.Sampler().is_stopped
