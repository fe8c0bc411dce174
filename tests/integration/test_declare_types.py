"""pyright strict takes a well-typed workflow, and refuses each wrong name and type in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD = """
from pathlib import Path
from threading import Event
from typing import TypedDict

from queue_workflows import OFFERED, ask, branch, node, pipeline, workflow
from queue_workflows.declare import filtered, run_input


class Counted(TypedDict):
    words: int
    parts: list[str]


@node(retries=3, timeout_s=60, retry_on=["OSError", KeyError], backoff={"kind": "linear"})
def count(text: str, least: int = 1) -> Counted:
    return {"words": len(text.split()), "parts": text.split()}


@node(queue="gpu", model="lengths")
def rank(parts: list[str], cancel_event: Event = OFFERED) -> Path:
    return Path(parts[0])


@node
def show(file: Path, words: int, out: Path = OFFERED) -> None:
    print(file, words, out)


@pipeline
def measure(parts: list[str], words: int) -> Path:
    file = rank(parts)
    show.options(skip_if=words == 0, after=[file])(file, words=words)
    return file


@workflow
def inner(words: int) -> Path:
    return rank([str(words)])


@workflow
def digest(text: str) -> None:
    counted = count(text=text)
    lead = ask("choose", "turnout", int, turnout_options=counted["parts"])
    file = measure.options("m", timeout_s=5, skip_if=lead != 1)(counted["parts"], lead)
    show(file=file, words=counted["words"])
    count(text=run_input("other", str))
    rank(filtered(counted["parts"], {"kind:eq": "csv"}))
    done = branch(counted["words"], {1: rank, 2: lambda: measure(counted["parts"], 1)}, id="b")
    rank.options("again")([str(done)])
    wide: Path | None = branch(lead, {0: lambda: rank([])}, other=lambda: show(done, 1))
    print(wide)
    made: Path = inner(counted["words"])
    show(file=made, words=1)
    count(text=inner.options("x", after=[made]).start(words=1))
    each: list[Counted] = count.map(counted["parts"], at_once=2, also={"least": 2})
    files: list[Path] = inner.map([1, 2], may_fail=0.5)
    print(each, files)


inputs: dict[str, object] = digest.inputs(text="a b")
plain: int = count("a b")["words"]
name: str = count.name
"""

BAD = """
from typing import TypedDict

from queue_workflows import ask, node, pipeline, workflow


class Counted(TypedDict):
    words: int


@node
def count(text: str) -> Counted:
    return {"words": len(text)}


@node
def show(words: int) -> None:
    print(words)


@pipeline
def group(words: int) -> int:
    return words


@node(queue="fast")  # wrong: queue
def fast() -> None: ...


@node(retrys=3)  # wrong: policy's name
def again() -> None: ...


@node(timeout_s="60")  # wrong: policy's type
def late() -> None: ...


@node(backoff={"kind": "fast"})  # wrong: policy's value
def soon() -> None: ...


@workflow
def inner(words: int) -> None:
    show(words)


@workflow
def digest(text: str) -> None:
    counted = count(text=text)
    count(txt=text)  # wrong: input's name
    count()  # wrong: missing input
    count(text=counted["words"])  # wrong: input's type
    show(words=counted["word"])  # wrong: output's name
    show(words=text)  # wrong: run's type
    show(words=ask("a", "turnout", str))  # wrong: answer's type
    show.options(retries="3")(1)  # wrong: option's type
    show.options(step="x")(1)  # wrong: option's name
    group(text)  # wrong: pipeline's type
    inner(text)  # wrong: child's type
    inner.start(word=1)  # wrong: child's name
    inner.map([text])  # wrong: type of an item's child
    inner.map([1], kye="x")  # wrong: map's name
    count.map([counted["words"]])  # wrong: item's type


digest.inputs(txt="a")  # wrong: inputs's name
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The findings of pyright in each file, by line from 1."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    settings: dict[str, Any] = {
        "include": ["good.py", "bad.py"],
        "strict": ["."],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.10",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            "-p",
            ".",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found: dict[str, dict[int, str]] = {"good.py": {}, "bad.py": {}}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        found[Path(each["file"]).name][line] = each["message"]
    return found


def test_pyright_takes_a_good_one(complaints: dict[str, dict[int, str]]) -> None:
    assert complaints["good.py"] == {}


def test_pyright_refuses_every_wrong_line(complaints: dict[str, dict[int, str]]) -> None:
    wrong = [n for n, line in enumerate(BAD.splitlines(), start=1) if "# wrong:" in line]
    assert sorted(complaints["bad.py"]) == wrong
