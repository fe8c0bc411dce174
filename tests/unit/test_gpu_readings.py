"""The output of GPU tools, /proc and cgroups as a sample; uncertain readings are unknown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from queue_workflows.telemetry import worker_usage
from tests.support import tabled
from tests.support.examples import examples

NEW_PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       4101     C     72     31      -      -      -      -    python3 -m host
    0       4102     C      -      -      -      -      -      -    python3
    1       4101     C      4      1      -     55      -      -    python3
    1          -     -      -      -      -      -      -      -    -
"""
OLD_PMON = """\
# gpu        pid  type    sm   mem   enc   dec   command
# Idx          #   C/G     %     %     %     %   name
    0       4101     C     0     0     0     0   python
"""
MEMORY_PMON = """\
# gpu         pid   type     fb   ccpm    sm    command
# Idx           #    C/G     MB     MB     %    name
    0       4101     C   9000     12      3    python
"""
NOBODY_PMON = """\
# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0          -     -      -      -      -      -    -
"""
ROCM_TEXT = """\
============================ ROCm System Management Interface ============================
=================================== % time GPU is busy ===================================
GPU[0]\t\t: GPU use (%): 3
GPU[1]\t\t: GPU use (%): 87
==========================================================================================
"""
ROCM_JSON = (
    'WARNING: a low-power state\n{"card0": {"GPU use (%)": "3"}, "card1": {"GPU use (%)":"0"}}'
)


def row(*use: str, gpu: str = "0", pid: int = 1) -> worker_usage.Process:
    return worker_usage.Process(gpu, pid, use)


def test_processes_of_pmon_with_their_percent_columns() -> None:
    dash = ("-",) * 4
    assert worker_usage.pmon_processes(NEW_PMON) == [
        row("72", "31", *dash, pid=4101),
        row("-", "-", *dash, pid=4102),
        row("4", "1", "-", "55", "-", "-", gpu="1", pid=4101),
    ]
    assert worker_usage.pmon_processes(OLD_PMON) == [row("0", "0", "0", "0", pid=4101)]
    assert worker_usage.pmon_processes(MEMORY_PMON) == [row("3", pid=4101)]


def test_no_processes_in_what_is_not_a_list_of_them() -> None:
    cases: list[Any] = [
        "",
        NOBODY_PMON,
        "    0       4101     C     72     31      -      -    python\n",
        "# gpu pid type sm\n    0 4101 C 72\n",
        "# Idx # C/G %\n    0 4101 C 72\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "#\n# \n\x00\x01#pid\n",
        "# gpu pid sm\n# Idx # %\n0 four 7\n0 -4 7\n0 99999999999 7\n0\n",
    ]
    for text in cases:
        with tabled.case(text):
            assert worker_usage.pmon_processes(text) == []


def test_a_row_that_breaks_off_has_unknown_use() -> None:
    (cut,) = worker_usage.pmon_processes("# gpu pid type sm mem\n# Idx # C/G % %\n 0 7 C 12")
    assert cut == row("12", "", pid=7)
    assert worker_usage.pmon_use([cut], shown=True) is None


def test_use_of_own_processes() -> None:
    cases: list[Any] = [
        ([row("72", "31", "-")], True, 72.0),
        ([row("0", "0", "-", "55")], True, 55.0),
        ([row("-", "-")], True, 0.0),
        ([row("-", "-")], False, None),
        ([row("3", "0"), row("4", "0")], True, 7.0),
        ([row("3", "0"), row("4", "0", gpu="1")], True, 4.0),
        ([row("80", "0"), row("70", "0")], True, 100.0),
        ([row("3", "[N/A]")], True, None),
        ([row("3"), row("N/A")], True, None),
        ([row("101")], True, None),
        ([row("-3")], True, None),
        ([row("nan")], True, None),
        ([row("٣")], True, None),
        ([row("1e1")], True, None),
        ([row()], True, None),
        ([], True, None),
    ]
    for rows, shown, used in cases:
        with tabled.case(rows, shown, used):
            assert worker_usage.pmon_use(rows, shown=shown) == used


def test_use_of_a_machine_with_nvidia() -> None:
    cases: list[Any] = [
        ("45 %\n", 45.0),
        ("0\n", 0.0),
        ("3 %\n97 %\n\n", 97.0),
        ("[N/A]\n", None),
        ("0 %\n[N/A]\n", None),
        ("[Not Supported]\n", None),
        ("No devices were found\n", None),
        ("", None),
        ("%\n", None),
        ("-1 %\n", None),
        ("250 %\n", None),
        ("45 %, 12 %\n", None),
    ]
    for text, used in cases:
        with tabled.case(text, used):
            assert worker_usage.nvidia_use(text) == used


def test_use_of_a_machine_with_rocm() -> None:
    cases: list[Any] = [
        (ROCM_TEXT, 87.0),
        (ROCM_JSON, 3.0),
        ('{"card0": {"GPU use (%)": "N/A"}}', None),
        ('{"card0": {"GPU use (%)": "0"}, "card1": {"GPU use (%)": "N/A"}}', None),
        ('{"card0": {"GPU use (%)": ""}}', None),
        ("GPU[0] : GPU use (%):", None),
        ("GPU[0] : get_gpu_use_percent, Not supported on the given system", None),
        ("{}", None),
        ("", None),
    ]
    for text, used in cases:
        with tabled.case(text, used):
            assert worker_usage.rocm_use(text) == used


@given(st.text(st.sampled_from("# \n\t-%0123456789.,:[]/N AGPUuse()pidsmgn\x00٣é")))
@settings(max_examples=examples(150))
@example("# pid\n# %\n" + "9" * 5000 + " " + "9" * 5000)
def test_rubbish_gives_a_percentage_or_unknown(text: str) -> None:
    headed = "# gpu pid sm mem\n# Idx # % %\n" + text
    found = [worker_usage.nvidia_use(text), worker_usage.rocm_use(text)]
    found.append(worker_usage.rocm_use(text.replace("\n", "\nGPU use (%): ")))
    for shown in (True, False):
        found.append(worker_usage.pmon_use(worker_usage.pmon_processes(headed), shown=shown))
        found.append(worker_usage.pmon_use(worker_usage.pmon_processes(text), shown=shown))
    assert all(used is None or 0 <= used <= 100 for used in found)


# --- whose process ----------------------------------------------------------------------------


def make_process(proc: Path, pid: int, parent: object, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1")


def test_own_process_and_what_came_from_it(tmp_path: Path) -> None:
    me, child, grandchild, stranger = os.getpid(), 900001, 900002, 900003
    make_process(tmp_path, child, me, name="a) S 1 (b")
    make_process(tmp_path, grandchild, child)
    make_process(tmp_path, stranger, 1)
    owned = {pid: worker_usage.is_descendant(pid, tmp_path) for pid in (me, child, grandchild)}
    assert all(owned.values())
    assert not worker_usage.is_descendant(stranger, tmp_path)


@pytest.mark.parametrize("parent", ["0", "1", "x", "-1", "900009", "900001"])
def test_a_process_with_unknown_parents_is_not_ours(tmp_path: Path, parent: str) -> None:
    make_process(tmp_path, 900001, parent)
    assert not worker_usage.is_descendant(900001, tmp_path)


# --- RAM --------------------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self/status").write_text("Name:\tpython\nVmPeak:\t 9 kB\nVmRSS:\t  204800 kB\n")
    return folder


def make_group(
    tmp_path: Path, name: str, *, used_mb: float | None = None, limit: str | None = None
) -> None:
    folder = tmp_path / "cgroup" / name.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    if used_mb is not None:
        (folder / "memory.current").write_text(f"{int(used_mb * 2**20)}\n")
    if limit is not None:
        (folder / "memory.max").write_text(f"{limit}\n")


def ram_mb(proc: Path, own: str) -> float | None:
    (proc / "self/cgroup").write_text(f"4:memory:/old\n0::{own}\n")
    return worker_usage.ram_mb(proc, proc.parent / "cgroup")


def test_ram_of_a_container_with_a_cgroup_namespace(tmp_path: Path, proc: Path) -> None:
    make_group(tmp_path, "/", used_mb=700, limit="max")
    assert ram_mb(proc, "/") == 700


def test_ram_of_a_limited_cgroup(tmp_path: Path, proc: Path) -> None:
    make_group(tmp_path, "/a/b", used_mb=300, limit="1073741824")
    assert ram_mb(proc, "/a/b") == 300


def test_ram_of_a_cgroup_under_a_limited_one(tmp_path: Path, proc: Path) -> None:
    make_group(tmp_path, "/a", limit="1073741824")
    make_group(tmp_path, "/a/b", used_mb=300, limit="max")
    assert ram_mb(proc, "/a/b") == 300


def test_own_rss_where_nothing_contains_us(tmp_path: Path, proc: Path) -> None:
    make_group(tmp_path, "/user/shell", used_mb=300, limit="max")
    assert ram_mb(proc, "/user/shell") == 200
    assert ram_mb(proc, "/") == 200
    assert ram_mb(proc, "/gone (deleted)") == 200


@pytest.mark.parametrize("name", ["/../a", "/a/../../x", "", "nonsense"])
def test_own_rss_where_the_cgroup_is_out_of_sight(tmp_path: Path, proc: Path, name: str) -> None:
    make_group(tmp_path, "/a", used_mb=300, limit="1")
    make_group(tmp_path, "/../x", used_mb=300, limit="1")
    assert ram_mb(proc, name) == 200


def test_own_rss_if_the_cgroup_is_invalid(tmp_path: Path, proc: Path) -> None:
    make_group(tmp_path, "/a", limit="1073741824")
    (tmp_path / "cgroup/a/memory.current").write_bytes(b"\xff\x00many")
    assert ram_mb(proc, "/a") == 200


@pytest.mark.parametrize("status", ["", "VmRSS:\n", "VmRSS: much kB\n", None])
def test_ram_without_a_reading_is_unknown(proc: Path, status: str | None) -> None:
    if status is None:
        (proc / "self/status").unlink()
    else:
        (proc / "self/status").write_text(status)
    assert worker_usage.ram_mb(proc, proc / "none") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_ram_of_this_very_process() -> None:
    found = worker_usage.ram_mb(Path("/proc"), Path("/sys/fs/cgroup"))
    assert found is not None
    assert 5 < found < 10_000_000
