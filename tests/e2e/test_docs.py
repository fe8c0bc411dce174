"""The blocks of README and docs/ run in order, and their links exist."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from queue_workflows import db, model_registry
from tests.support import database, embedded_servers, fork_server, markdown, reaper, wait

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: markdown.blocks(page) for page in PAGES}
COMMAND_S = 60
SCRIPTS = ("queue-workflows", "queue-worker-control")
NEEDS_A_SHELL = re.compile(r"[$`|&;<>(){}*?!~#\n]|\[(?![\w\"{])|\\")
EXPORT = re.compile(r"export (\w+)=(.*)", re.DOTALL)
"""A variable of the terminal, for all further commands of the page."""
LOGIN = re.compile(r"postgresql://(\w+):[\w-]+@localhost:5432/(\w+)")
"""A role and a database on the server of the page's machine."""
A_DATABASE = re.compile(r"\b((?:CREATE|DROP) DATABASE) (\w+)")
CREATED = re.compile(r"\bCREATE (DATABASE|ROLE) (\w+)")
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _terminal() -> dict[str, str]:
    """Return the environment of a person who types the commands.

    Of the variables of tests it has only the mark by which the reaper ends what a killed test left.
    """
    own = ("COVERAGE_", "PYTHONPATH", reaper.MARK)
    tools = (Path(sys.executable).parent, embedded_servers.installation() / "bin")
    return {
        "PATH": os.pathsep.join([*map(str, tools), os.environ["PATH"]]),
        "LANG": "C.UTF-8",
        **{name: text for name, text in os.environ.items() if name.startswith(own)},
    }


class Reader:
    """Somebody who follows a page, in an empty folder, with a database that has the schema."""

    def __init__(self, folder: Path, dsn: str, server: fork_server.ForkServer | None) -> None:
        self.folder = folder
        self._server = server
        self.dsn = dsn
        self.names: dict[str, Any] = {"__name__": "page"}
        self._running = contextlib.ExitStack()
        self._server_parts = conninfo.conninfo_to_dict(dsn)
        self._created: list[tuple[str, str]] = []
        """Databases and roles that commands of the page have created."""
        self.environment = {
            **_terminal(),
            "HOME": str(folder),
            "QUEUE_WORKFLOWS_DB_URL": dsn,
            "QUEUE_WORKFLOWS_TEST_DB_URL": dsn,
            # psql without an argument connects as the superuser of the server.
            **{
                f"PG{key.upper()}": str(self._server_parts[key])
                for key in ("host", "port", "user", "password")
                if self._server_parts.get(key)
            },
            "PGDATABASE": "postgres",
        }

    def follow(self, block: markdown.Block) -> None:
        """Store the block if it has a file's name, then run it."""
        if block.file:
            target = self.folder / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        if block.language in markdown.RUN:
            {"python": self._python, "sql": self._sql, "console": self._console}[block.language](
                block
            )

    def _python(self, block: markdown.Block) -> None:
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        # What a stored block declares is what the module of its name will declare again.
        module = block.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.names["__name__"] = module or "page"
        exec(code, self.names)

    def _sql(self, block: markdown.Block) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            try:
                conn.execute(block.text.encode())
            except psycopg.Error as error:
                pytest.fail(f"{block}: {error}")

    def _console(self, block: markdown.Block) -> None:
        if block.background:
            (command,) = markdown.commands(block)
            self._running.enter_context(self._goes_on(block, command.text))
            return
        for command in markdown.commands(block):
            if exported := EXPORT.fullmatch(command.text):
                done = self._run(f"printf %s {exported[2]}")
                self.environment[exported[1]] = done.stdout
                continue
            done = self._run(command.text)
            got = f"{block}: $ {command.text}\n{done.stdout}{done.stderr}"
            assert done.returncode == 0, f"exit code {done.returncode}: {got}"
            same = doctest.OutputChecker().check_output(command.output, done.stdout, _FLAGS)
            assert same or not command.output, f"the page shows\n{command.output}but {got}"

    def _here(self, text: str) -> str:
        """Return a command with this test's server in the place of the page's.

        Databases end in `_test`. A role is taken by the superuser, who may always log in.
        """
        text = A_DATABASE.sub(rf"\1 \2{database.SUFFIX}", text)
        return LOGIN.sub(
            lambda found: database.url(
                {
                    **self._server_parts,
                    "dbname": found[2] + database.SUFFIX,
                    "options": f"-c role={found[1]}",
                }
            ),
            text,
        )

    def _run(self, text: str) -> subprocess.CompletedProcess[str]:
        text = self._here(text)
        done = self._run_here(text)
        if done.returncode == 0:
            self._created += CREATED.findall(text)
        return done

    def _run_here(self, text: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(text)
        if self._server is not None and words[0] in SCRIPTS and not NEEDS_A_SHELL.search(text):
            return self._fork(self._server, words)
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def _fork(
        self, server: fork_server.ForkServer, words: list[str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a script without a shell, which has nothing to do, and without its imports."""
        with (
            Path(os.devnull).open("rb") as none,
            (self.folder / ".out").open("wb") as out,
            (self.folder / ".err").open("wb") as err,
        ):
            files = [none.fileno(), out.fileno(), err.fileno()]
            started = server.start(
                *words, env=self.environment, cwd=self.folder, files=files, finalize=True
            )
            try:
                code = started.wait(COMMAND_S)
            finally:
                started.kill()
        printed = [self.folder / name for name in (".out", ".err")]
        texts = [path.read_text(encoding="utf-8") for path in printed]
        for path in printed:
            path.unlink()
        return subprocess.CompletedProcess(words, code, *texts)

    @contextlib.contextmanager
    def _goes_on(self, block: markdown.Block, command: str) -> Generator[None]:
        """A command that runs until Ctrl-C, in a terminal of its own."""
        with (self.folder / "printed").open("wb") as printed:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._here(command)}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if block.ready:
                with psycopg.connect(self.environment["QUEUE_WORKFLOWS_DB_URL"]) as conn:
                    conn.autocommit = True
                    wait.until(lambda: conn.execute(block.ready.encode()).rowcount, timeout_s=60)
            yield
            process.send_signal(signal.SIGINT)
            code = process.wait(COMMAND_S)
            got_text = (self.folder / "printed").read_text()
            assert code == 0, f"{block}: $ {command}\nexit code {code}: {got_text}"
        finally:
            process.kill()
            process.wait()

    def end(self) -> None:
        """Press Ctrl-C where a command still runs, then drop what the page has created."""
        try:
            self._running.close()
        finally:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                for kind, name in sorted(set(self._created)):
                    force = " WITH (FORCE)" if kind == "DATABASE" else ""
                    conn.execute(f"DROP {kind} IF EXISTS {name}{force}".encode())
            self._created.clear()


@pytest.fixture(scope="module")
def server() -> Generator[fork_server.ForkServer | None]:
    """Forks the scripts of simple commands."""
    if sys.platform != "linux":
        yield None
        return
    with fork_server.started(*fork_server.MODULES, env=_terminal()) as made:
        yield made


@pytest.fixture
def reader(
    migrated_database: str,
    server: fork_server.ForkServer | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    monkeypatch.setenv("QUEUE_WORKFLOWS_TEST_DB_URL", migrated_database)
    before = set(sys.modules)
    made = Reader(tmp_path, migrated_database, server)
    yield made
    made.end()
    db.close_pool()
    model_registry.clear_for_tests()
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=_name)
def test_blocks_of_page_run(page: Path, reader: Reader) -> None:
    for block in BLOCKS[page]:
        if (block.language in markdown.RUN or block.file) and not block.no_run:
            reader.follow(block)
    reader.end()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_block_hides_from_being_run(page: Path) -> None:
    known = {*markdown.RUN, *markdown.SHOWN}
    assert not [f"{b}: language {b.language!r}" for b in BLOCKS[page] if b.language not in known]
    assert not [str(b) for b in BLOCKS[page] if b.no_run and len(b.no_run.split()) < 3]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in markdown.links(page):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{_name(page)}: {link}"
        if anchor:
            assert anchor in markdown.anchors(target), f"{_name(page)}: {link}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "decisions"], ids=_name
)
def test_page_ends_with_the_next_one(page: Path) -> None:
    assert "Continue with " in page.read_text(encoding="utf-8").rstrip().rpartition("\n\n")[2]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_file_is_named_in_the_text_above_it(page: Path) -> None:
    """The comment with the name is not visible where a page is read."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in BLOCKS[page]:
        above = lines[: block.line - 2]
        fences = [number for number, line in enumerate(above, start=1) if line.startswith("```")]
        text = re.sub(r"<!--.*?-->", "", " ".join(above[max(fences, default=0) :]))
        assert not block.file or f"`{block.file}`" in text, str(block)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_of_prose_have_at_most_100_characters(page: Path) -> None:
    text = re.sub(r"^```.*?^```\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    no_prose = ("|", "<!--", "- `")  # The last are lists of code, such as functions.
    assert not [
        line for line in text.splitlines() if len(line) > 100 and not line.startswith(no_prose)
    ]


def test_chapters_of_the_tutorial_name_the_database_of_their_python() -> None:
    """Without one the library refuses; here a variable names one for every page."""
    chapters = [
        p for p in PAGES if p.name == "folder-of-files.md" or p.stem.startswith("tutorial-")
    ]
    assert len(chapters) == 7
    for page in chapters:
        typed = [b for b in BLOCKS[page] if b.language == "python" and not (b.file or b.no_run)]
        named = ("export QUEUE_WORKFLOWS_EMBEDDED=1", "QUEUE_WORKFLOWS_DB_URL")
        text = page.read_text(encoding="utf-8")
        assert not typed or any(each in text for each in named), _name(page)


def test_pages_show_the_schema_version_of_this_code() -> None:
    shown = re.compile(
        r"this code needs (\d+)|version 12 -> (\d+):|version (\d+) -> 12:"
        r"|\bok +schema +at version (\d+)|migration 00(\d+) adds"
        r"|(?:apply|applied) 13, 14, 15, (\d+);|reverted (\d+), 15, 14, 13$",
        re.MULTILINE,
    )
    found = [
        (_name(page), int(number))
        for page in PAGES
        for match in shown.finditer(page.read_text(encoding="utf-8"))
        for number in match.groups()
        if number
    ]
    assert {page for page, _ in found} >= {"docs/fleet.md", "docs/upgrade.md"}
    assert not [each for each in found if each[1] != db.REQUIRED_VERSION]


def test_a_wrong_block_fails(reader: Reader, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nassert 1 == 2\n```\n\n```sql\nSELECT nothing FROM nowhere\n```\n\n"
        "```console\n$ false\n```\n\n```console\n$ echo one\ntwo\n```\n"
    )
    for block in markdown.blocks(page):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            reader.follow(block)


def test_a_command_that_goes_on_ends_with_the_page(reader: Reader, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- background: until Ctrl-C -->\n```console\n$ sleep 300\n```\n")
    (block,) = markdown.blocks(page)
    reader.follow(block)
    with pytest.raises(AssertionError, match="exit code -2"):
        reader.end()


def test_commands_and_marks_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- no-run: needs two machines -->\n\n```console\n$ a \\\n  b\n$ c\nout\n```\n"
        "text\n<!-- file: app.py -->\n```python\nx = 1\n```\n"
    )
    first, second = markdown.blocks(page)
    assert (first.no_run, first.line, second.file) == ("needs two machines", 4, "app.py")
    assert markdown.commands(first) == [("a \\\n  b", ""), ("c", "out\n")]
