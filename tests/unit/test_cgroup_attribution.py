"""The share of our containers in a machine's use, also without cgroups or a docker socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import config
from queue_workflows.cgroup_attribution import LIST_EVERY_S, Attribution, Usage

OURS, TOO, THEIRS = "a" * 64, "b" * 64, "c" * 64
MB = 1 << 20


class Docker:
    """Answers every request on a socket file with the same containers."""

    def __init__(self, path: Path) -> None:
        self.containers: Any = []
        self.status = "200 OK"
        self.asked = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                self.asked += 1
                body = json.dumps(self.containers)
                head = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(body)}\r\n\r\n"
                with contextlib.suppress(OSError):  # the client may disconnect in the middle
                    peer.sendall((head + body).encode())

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def ground() -> Iterator[Path]:
    """A folder of a short name: the path of a socket may have 107 bytes, which `tmp_path` fills."""
    with tempfile.TemporaryDirectory(prefix="qw-") as folder:
        yield Path(folder)


@pytest.fixture
def docker(ground: Path) -> Iterator[Docker]:
    made = Docker(ground / "docker.sock")
    made.containers = [
        {"Id": OURS, "Names": ["/mine-gpu"]},
        {"Id": TOO, "Names": ["/alias", "/mine-cpu"]},
        {"Id": THEIRS, "Names": ["/theirs"]},
        {"Id": "../../etc", "Names": ["/mine-evil"]},
        {"Id": "d" * 64, "Names": None},
        "rubbish",
    ]
    yield made
    made.close()


@pytest.fixture
def tree(ground: Path) -> Path:
    config.configure(container_prefix="mine-")
    folder = ground / "cgroup"
    write(folder / f"system.slice/docker-{OURS}.scope", cpu_us=1_000_000, ram=700, cache=200)
    write(folder / f"docker/{TOO}", cpu_us=5_000_000, ram=300)
    write(folder / f"system.slice/docker-{THEIRS}.scope", cpu_us=9_000_000, ram=9000)
    return folder


def write(folder: Path, *, cpu_us: int, ram: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text(f"usage_usec {cpu_us}\nuser_usec {cpu_us}\n")
    (folder / "memory.current").write_text(f"{ram * MB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache * MB}\n")


def attribution(tree: Path, now: list[float]) -> Attribution:
    return Attribution(cgroups=tree, docker=tree.parent / "docker.sock", now_fn=lambda: now[0])


def test_cpu_and_ram_of_the_containers_with_our_prefix(docker: Docker, tree: Path) -> None:
    now = [50.0]
    subject = attribution(tree, now)
    assert subject.read() == Usage(None, 800)
    now[0] += 2
    cores = os.cpu_count() or 1
    half = cores * 1_000_000  # half of all cores for 2 s
    write(tree / f"docker/{TOO}", cpu_us=5_000_000 + half, ram=400)
    assert subject.read() == Usage(50.0, 900)
    now[0] += 2
    assert subject.read() == Usage(0.0, 900)


def test_a_container_that_comes_goes_or_starts_again_counts_for_nothing_odd(
    docker: Docker, tree: Path
) -> None:
    now = [50.0]
    subject = attribution(tree, now)
    subject.read()
    now[0] += LIST_EVERY_S
    fresh = "e" * 64
    docker.containers = [
        {"Id": TOO, "Names": ["/mine-cpu"]},
        {"Id": fresh, "Names": ["/mine-new"]},
    ]
    write(tree / f"docker/{fresh}", cpu_us=900_000_000, ram=50)
    write(tree / f"docker/{TOO}", cpu_us=10, ram=100)
    assert subject.read() == Usage(0.0, 150)


def test_docker_is_queried_at_intervals(docker: Docker, tree: Path) -> None:
    now = [50.0]
    subject = attribution(tree, now)
    for now[0] in (50.0, 52.0, 54.0, 50.0 + LIST_EVERY_S):
        subject.read()
    assert docker.asked == 2


def test_without_the_tree_or_the_socket_nothing_is_known(tree: Path, ground: Path) -> None:
    assert attribution(tree, [0.0]).read() is None
    assert attribution(ground / "none", [0.0]).read() is None


@pytest.mark.parametrize(
    ("status", "containers"),
    [
        ("500 Oops", []),
        ("403 Forbidden", {"message": "no"}),
        ("200 OK", {"message": "?"}),
        ("", []),
        ("200 OK", "x" * (5 << 20)),
    ],
)
def test_a_docker_that_refuses_is_unknown(
    docker: Docker, tree: Path, status: str, containers: Any
) -> None:
    docker.status, docker.containers = status, containers
    assert attribution(tree, [0.0]).read() is None


def test_a_container_with_missing_or_invalid_files_counts_nothing(
    docker: Docker, tree: Path
) -> None:
    subject = attribution(tree, [50.0])
    assert subject.read() == Usage(None, 800)
    (tree / f"docker/{TOO}/memory.current").unlink()
    (tree / f"docker/{TOO}/cpu.stat").write_bytes(b"\xff usage_usec many\n")
    assert subject.read() == Usage(None, 500)


def test_what_containers_without_a_cgroup_in_the_tree_use_is_unknown(
    docker: Docker, ground: Path
) -> None:
    """As where cgroups are of version 1: a folder a controller."""
    config.configure(container_prefix="mine-")
    for name in (f"memory/docker/{OURS}", f"cpu,cpuacct/docker/{OURS}"):
        (ground / "v1" / name).mkdir(parents=True)
    subject = Attribution(cgroups=ground / "v1", docker=ground / "docker.sock")
    assert subject.read() is None


def test_no_container_of_ours_is_nothing_used_and_known(docker: Docker, tree: Path) -> None:
    docker.containers = []
    now = [50.0]
    subject = attribution(tree, now)
    subject.read()
    now[0] += 2
    assert subject.read() == Usage(0.0, 0)
