"""Define an app whose processes die by SIGKILL right before or after their n-th commit."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any, NamedTuple, NoReturn, TypeVar

import psycopg
from psycopg import pq

import queue_workflows
from queue_workflows import refs, steps
from queue_workflows.dag import policy
from queue_workflows.db import link, scripts
from queue_workflows.scheduler import ScheduleEntry

T = TypeVar("T")
APP = "tests.support.failpoints:setup"
AT = "QW_TEST_FAILPOINT"
"""Where to die, as `Point.text`; unset: nowhere."""
FOLDER = "QW_TEST_FOLDER"
"""Where `commits` and `bodies` (runs of handlers) are journalled."""
HOOKS = "QW_TEST_HOOKS"
"""Set: the app has a resolver of its own and a hook for completed nodes."""
ENTRY = "QW_TEST_ENTRY"
"""Name and minute of the schedule's one entry."""
QUEUE = "notes"
RETRY_S = 0.005
EVENT = "sent"
ROUNDS = 3


class Point(NamedTuple):
    """The n-th commit of a thread or a place, and the side of it on which the process dies."""

    nth: int
    side: str
    """`before` the server gets the COMMIT, or `after` it has acknowledged it."""
    thread: str = ""
    """Its name; empty: any."""
    place: str = ""
    """As journalled; empty: any."""

    @property
    def text(self) -> str:
        return json.dumps(self)

    def counts(self, thread: str, place: str) -> bool:
        """Return whether a commit is one of those that it counts."""
        return self.thread in ("", thread) and self.place in ("", place)


# --- the mechanism: in the role's process --------------------------------------------------------


class Failpoint:
    """Journals each commit of this process that changed something, and dies at one of them.

    What commits itself is put in a transaction, so that it can be seen to have changed something
    and that the process can die with the work done and nothing committed.
    """

    def __init__(self, journal: Path, point: Point | None) -> None:
        self._journal = journal
        self._point = point
        self._seen = 0

    def install(self) -> None:
        """Patch psycopg and the worker's connections until this process ends."""
        execute, leave = psycopg.Cursor.execute, psycopg.Transaction.__exit__
        commit, around = psycopg.Connection.commit, self._around

        def cursor_execute(cur: psycopg.Cursor[Any], query: Any, *args: Any, **more: Any) -> Any:
            conn = cur.connection
            pg = conn.pgconn
            if not (conn.autocommit and pg.transaction_status == pq.TransactionStatus.IDLE):
                return execute(cur, query, *args, **more)
            _command(pg, b"BEGIN")
            try:
                execute(cur, query, *args, **more)
            except BaseException:
                if not conn.closed:
                    _command(pg, b"ROLLBACK")
                raise
            around(pg, lambda: _command(pg, b"COMMIT"))
            return cur

        def transaction_exit(block: psycopg.Transaction, kind: Any, *rest: Any) -> Any:
            if kind is not None or block.force_rollback or block.savepoint_name:
                return leave(block, kind, *rest)
            return around(block.connection.pgconn, lambda: leave(block, kind, *rest))

        def connection_commit(conn: psycopg.Connection[Any]) -> None:
            around(conn.pgconn, lambda: commit(conn))

        psycopg.Cursor.execute = cursor_execute
        psycopg.Transaction.__exit__ = transaction_exit
        psycopg.Connection.commit = connection_commit
        self._install_in_links()

    def _install_in_links(self) -> None:
        run, around = link.Link._execute, self._around

        def link_execute(self: link.Link, statement: scripts.Statement) -> link.Waits:
            pg: Any = self._pg
            if statement is scripts.COMMIT and self._depth == 1:
                self._depth = 0
                around(pg, lambda: _command(pg, b"COMMIT"))
                return []
            is_alone = pg.transaction_status == pq.TransactionStatus.IDLE
            if statement is scripts.BEGIN or not is_alone or self._begin:
                return (yield from run(self, statement))
            _command(pg, b"BEGIN")
            try:
                rows = yield from run(self, statement)
            except psycopg.Error:
                if pg.status == pq.ConnStatus.OK:
                    _command(pg, b"ROLLBACK")
                raise
            around(pg, lambda: _command(pg, b"COMMIT"))
            return rows

        link.Link._execute = link_execute

    def _around(self, pg: pq.abc.PGconn, commit: Callable[[], T]) -> T:
        xid = _changed_by(pg)
        if xid is None:
            return commit()
        place = _place()
        began = _command(pg, b"SELECT extract(epoch FROM now())").get_value(0, 0)
        side = self._side(place)
        if side == "before":
            self._die(place)
        value = commit()
        self._note("commit", place, xid=xid, began=(began or b"").decode())
        if side == "after":
            self._die(place)
        return value

    def _side(self, place: str) -> str | None:
        """Return on which side of this commit to die; None: on none."""
        point = self._point
        if point is None or not point.counts(threading.current_thread().name, place):
            return None
        self._seen += 1
        return point.side if self._seen == point.nth else None

    def _note(self, what: str, place: str, **more: Any) -> None:
        thread = threading.current_thread().name
        append(self._journal, what=what, pid=os.getpid(), thread=thread, place=place, **more)

    def _die(self, place: str) -> NoReturn:
        self._note("killed", place)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def _command(pg: pq.abc.PGconn, command: bytes) -> pq.abc.PGresult:
    result = pg.exec_(command)
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise psycopg.errors.error_from_result(result)
    return result


def _changed_by(pg: pq.abc.PGconn) -> int | None:
    """Return the id of the open transaction; None if it has changed nothing, or is lost."""
    if pg.transaction_status != pq.TransactionStatus.INTRANS:
        return None
    text = _command(pg, b"SELECT pg_current_xact_id_if_assigned()").get_value(0, 0)
    return int(text) if text else None


def _place() -> str:
    """Return the engine's functions that lead to this commit, innermost first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 5:
        if frame.f_code in _RUNS_SCRIPTS:
            found += _inside(frame.f_locals["script"])
        _add(found, frame)
        frame = frame.f_back
    return " < ".join(found[:5])


_RUNS_SCRIPTS = (scripts.run.__code__, link.Link._script.__code__)


def _inside(script: Any) -> list[str]:
    """Return the functions of a script that led to its statement, innermost first."""
    found: list[str] = []
    while isinstance(script, GeneratorType) and script.gi_frame is not None:
        _add(found, script.gi_frame)
        script = script.gi_yieldfrom
    return found[::-1]


def _add(found: list[str], frame: FrameType) -> None:
    package, _, module = frame.f_globals.get("__name__", "").partition(".")
    if package == "queue_workflows" and not module.startswith(("db.", "runtime.")):
        found.append(f"{module}.{frame.f_code.co_name}")


def append(path: Path, **line: Any) -> None:
    """Add a line of JSON to a journal in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the app: `--app tests.support.failpoints:setup` ----------------------------------------


def setup() -> None:
    """Register everything; a role that has loaded the app installs its failpoint by this, too."""
    register()
    install()


@functools.cache
def install() -> None:
    """Install the failpoint that the environment names, and let what failed be tried again soon."""
    policy.BASE_S = RETRY_S
    text = os.environ.get(AT)
    point = Point(*json.loads(text)) if text else None
    Failpoint(Path(os.environ[FOLDER], "commits"), point).install()


def register() -> None:
    """Register what the submitting process needs too."""
    queue_workflows.configure(ingest_queues={QUEUE})
    for body in (work, fails_once, fails, lists):
        queue_workflows.register_node(body.__name__, body)
        queue_workflows.register_ingest_task(body.__name__, _task(body))
    queue_workflows.register_ingest_task("stepped", stepped)
    hooked = HOOKS in os.environ
    queue_workflows.set_workflow_provider(
        lambda name: {"name": name, "steps": WORKFLOWS[name], "output": OUTPUTS.get(name)},
        lambda name: {"name": name, "nodes": PIPELINES.get(name, [_NODE | {"node": name}])},
        resolve_ref=refs.resolve_ref if hooked else None,
    )
    if hooked:
        queue_workflows.set_on_node_completed(lambda job, run, delta: None)
    name, minute = os.environ.get(ENTRY, "hourly 0").split()
    queue_workflows.set_ingest_schedule([ScheduleEntry(name, int(minute), "work", QUEUE)])


def work(tag: str, me: str, seen: str | None = None) -> dict[str, Any]:
    """Return a token that no other execution returns, and the value of the previous node."""
    token = secrets.token_hex(6)
    append(Path(os.environ[FOLDER], "bodies"), tag=tag, me=me, token=token)
    return {"token": token, "seen": seen}


def fails_once(tag: str, me: str) -> dict[str, Any]:
    """Fail at the first execution."""
    done = work(tag, me)
    if len(executions(Path(os.environ[FOLDER]), tag).get(me, [])) == 1:
        raise ValueError("the first time")
    return done


def fails(tag: str, me: str) -> None:
    work(tag, me)
    raise ValueError("every time")


def lists(tag: str, me: str) -> dict[str, Any]:
    """Return the list that `mapped` works on."""
    return work(tag, me) | {"items": [{"key": key, "me": f"of-{key}"} for key in ITEMS]}


def stepped(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Do two steps with a loop, a sleep and a wait for an event between them.

    Each step and each round is an execution: of `<me>`, `<me>-round` and `<me>-last`.
    """
    del reason
    tag, me = args["tag"], args["me"]
    first = steps.step("first", work, tag, me)
    for _ in steps.steps("round", range(ROUNDS)):
        work(tag, f"{me}-round")
    steps.sleep(RETRY_S)
    seen = steps.wait_for_event(EVENT, key=tag)
    last = steps.step("last", work, tag, f"{me}-last", seen)
    return {"token": first["token"], "last": last["token"], "seen": last["seen"]}


def executions(folder: Path, tag: str) -> dict[str, list[str]]:
    """Return the tokens that the handlers of one workload have made, by job."""
    found: dict[str, list[str]] = {}
    for line in lines(folder / "bodies"):
        if line["tag"] == tag:
            found.setdefault(line["me"], []).append(line["token"])
    return found


def _task(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reason, args: body(**{"tag": reason, "me": "hourly"} | args)


_NODE = {
    "id": "n",
    "retries": 1,
    "inputs": [{"name": name, "from": f"pipeline.{name}"} for name in ("tag", "me", "seen")],
}


def _step(me: str, *after: str, body: str = "work", sees: str | None = None, **more: Any) -> Any:
    given: dict[str, Any] = {"tag": {"$from": "tag"}, "me": me}
    if sees:
        given["seen"] = {"$from": sees}
    step = {"id": me, "kind": "pipeline", "pipeline": body, "inputs": given}
    return step | {"depends_on": list(after), **more}


ITEMS = ("c", "a", "b")
DECIDING = ("a", "b")
_PAIR = [
    _NODE | {"node": "work"},
    _NODE
    | {
        "id": "m",
        "node": "fails_once",
        "depends_on": ["n"],
        "inputs": [
            {"name": "tag", "from": "pipeline.tag"},
            {"name": "me", "from": "pipeline.second"},
        ],
    },
]


def _arm(name: str, body: str = "work") -> Any:
    inputs = [{"name": key, "from": f"pipeline.{key}"} for key in ("tag", "seen")]
    me = {"name": "me", "from": f"pipeline._implicit({name})"}
    return {"id": name, "node": body, "retries": 1, "inputs": [*inputs, me]}


PIPELINES: dict[str, list[Any]] = {
    # Each round has a name of its own: the token of the round before.
    "rounds": [_NODE | {"id": "round", "node": "fails_once", "inputs": _NODE["inputs"][:2]}],
    # So have the arms of an item: the token of the node before.
    "item-arms": [
        _NODE | {"id": "film", "node": "work", "inputs": _NODE["inputs"][:2]},
        _NODE
        | {
            "id": "again",
            "node": "fails_once",
            "depends_on": ["film"],
            "inputs": [_NODE["inputs"][0], {"name": "me", "from": "pipeline.film"}],
        },
        _NODE | {"id": "other", "node": "work", "inputs": _NODE["inputs"][:2]},
    ],
    "pair": _PAIR,
    "arms": [
        _arm("film"),
        _arm("again", "fails_once") | {"depends_on": ["film"]},
        _arm("other"),
    ],
}
_MAP = {
    "id": "each",
    "kind": "map",
    "over": {"$from": "list/n.items"},
    "key": "key",
    "at_once": 2,
    "depends_on": ["list"],
    "pipeline": "pair",
    "inputs": {
        "tag": {"$from": "tag"},
        "me": {"$from": "item.me"},
        "second": {"$from": "item.key"},
    },
    "result": {"$from": "m.token"},
}
_ASK = {"id": "ask", "kind": "input", "widget": "file_upload", "target": "said"}
_RUN_EACH = {
    "id": "go",
    "kind": "run",
    "workflow": "treat",
    "inputs": {"tag": {"$from": "tag"}, "me": {"$from": "item.me"}},
}
_TAG = {"tag": {"$from": "tag"}}
_DECIDE = [
    {"id": "n", "kind": "node", "node": "work", "inputs": {**_TAG, "me": {"$from": "item.me"}}},
    {
        "id": "done",
        "kind": "branch",
        "depends_on": ["n"],
        "on": {"$from": "item.key"},
        "arms": {"a": "again"},
        "other": "other",
        "pipeline": "item-arms",
        "inputs": {**_TAG, "me": {"$from": "n.token"}, "film": {"$from": "done/film.token"}},
    },
    {
        "id": "again",
        "kind": "loop",
        "depends_on": ["done"],
        "pipeline": "rounds",
        "inputs": {**_TAG, "me": {"$from": "again.token"}},
        "start": {"$from": "done"},
        "until": {"$from": "again.token", "$eq": "never"},
        "result": "round",
        "at_most": 2,
        "must": False,
    },
]
OUTPUTS = {
    "inside": {"token": {"$from": "made/n.token"}},
    "treat": {"token": {"$from": "only/n.token"}},
}
WORKFLOWS: dict[str, list[Any]] = {
    "whole": [
        _step("first"),
        _step("left", "first", sees="first/n.token"),
        _step("right", "first", body="fails_once"),
        _step("join", "left", "right", sees="left/n.token"),
        _step("never", "first", skip_if={"$from": "skip"}),
        _ASK | {"depends_on": ["join", "never"]},
        _step("last", "ask", sees="ask.said"),
    ],
    "short": [
        _step("first"),
        _ASK | {"depends_on": ["first"]},
        _step("last", "ask", sees="first/n.token"),
    ],
    "growing": [
        _step("first"),
        {
            **_step("done", "first", body="arms", sees="first/n.token"),
            "kind": "branch",
            "on": {"$from": "kind"},
            "arms": {"film": "again"},
            "other": "other",
        },
        {
            "id": "child",
            "kind": "run",
            "workflow": "inside",
            "inputs": {"tag": {"$from": "tag"}, "seen": {"$from": "done.token"}},
            "depends_on": ["done"],
        },
        {
            **_step("again", "child", body="rounds"),
            "kind": "loop",
            "inputs": {"tag": {"$from": "tag"}, "me": {"$from": "again.token"}},
            "start": {"$from": "child"},
            "until": {"$from": "again.token", "$eq": "never"},
            "result": "round",
            "at_most": 2,
            "must": False,
        },
        _step("last", "again", sees="again.token"),
    ],
    "inside": [_step("within", body="fails_once"), _step("made", "within", sees="seen")],
    "mapped": [
        _step("list", body="lists"),
        _MAP,
        _step("join", "each", sees="each.results"),
    ],
    "deciding": [
        {
            "id": "each",
            "kind": "map",
            "over": [{"key": key, "me": f"of-{key}"} for key in DECIDING],
            "key": "key",
            "steps": _DECIDE,
            "result": {"$from": "again.token"},
        },
        _step("join", "each", sees="each.results"),
    ],
    "treated": [
        _step("list", body="lists"),
        {key: _MAP[key] for key in ("id", "kind", "over", "key", "at_once", "depends_on")}
        | {"steps": [_RUN_EACH], "result": {"$from": "go.token"}},
        _step("join", "each", sees="each.results"),
    ],
    "treat": [
        {
            **_step("only", body="fails_once"),
            "inputs": {"tag": {"$from": "tag"}, "me": {"$from": "me"}},
        }
    ],
    "broken": [_step("bad", body="fails"), _step("after", "bad")],
}
