"""Follow a run or a job as it changes: states, events, growing logs, streams and questions."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from queue_workflows import db, errors, history, runs, streams
from queue_workflows.admin import attempt_history
from queue_workflows.claim import job_tables
from queue_workflows.cli import answer, command, output, run_views, texts
from queue_workflows.db import statements
from queue_workflows.runtime import display, entry_point, exit_codes, signals
from queue_workflows.types import TERMINAL_JOB_STATUSES, JsonDict, Row

PART_CHARACTERS = 1000
FIRST_TICK_S = 0.02
TICK_GROWS = 1.15
TICK_S = 0.2
TICK_LARGE_S = 0.5
"""Seconds between two reads of a run. The first pauses are short, for short runs; later ones depend
on the size of the run."""
OUTPUT_S = 0.5
"""Seconds between two reads of what handlers print and stream, at least."""
LAST_S = 0.1
LAST_READS = 40
LAST_MAX_S = 2.0
"""Seconds after a job's end by which its worker has stored the log. On a slow machine it takes as
long as so many reads do here, and at most the last."""
_MARGIN = timedelta(seconds=10)
"""A transaction may commit this long after the time that it wrote."""


class _Output:
    """Print the logs and streams of jobs, each line once and in order."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._given: dict[tuple[str, int], int] = {}
        """How many bytes of an attempt's log were printed."""
        self._after: dict[str, str] = {}
        """The last part of a job that was printed."""
        self._unreadable: set[str] = set()
        """The jobs whose stream cannot be read, which is reported once."""

    def _show_log(self, label: str, log: Row, *, last: bool) -> None:
        """Print the new lines of an attempt's log; an incomplete last line only if `last`."""
        key = log["job_id"], log["claim_no"]
        head, tail = log["head"].encode(), log["tail"].encode()
        given, after_cut = self._given.get(key, 0), len(head) + log["cut_bytes"]
        fresh = head[given:]
        lost = after_cut - max(given, len(head))
        if lost > 0:
            fresh += attempt_history.gap(lost).encode()
        fresh += tail[max(0, given - after_cut) :]
        whole = len(fresh) if last else max(fresh.rfind(b"\n"), fresh.rfind(b"\r")) + 1
        # The incomplete line follows the marker of omitted text, which ends with a line end.
        self._given[key] = after_cut + len(tail) - (len(fresh) - whole)
        text = fresh[:whole].decode(errors="replace")
        for line in display.lines(text.rstrip("\r\n")) if text else ():
            self._print(f"{output.line(label)} | {output.line(line, 1000)}".rstrip())

    def _show_stream(self, job_id: str, label: str = "") -> None:
        """Print the handler's new parts of streams, each after `label`.

        Without a label each follows its attempt. Raises `UnknownJob` if the job is gone.
        """
        full = job_id not in self._unreadable
        while full:
            try:
                page = streams.read_page(job_id, after=self._after.get(job_id))
            except errors.UnreadableRow as error:
                self._unreadable.add(job_id)
                text = f"its stream cannot be shown: {output.line(str(error), 200)}"
                self._print(f"{label}: {text}" if label else text)
                return
            for part in page.parts:
                attempt = f"attempt {part.claim_no}"
                if part.is_reset:
                    name = f"{label}: {attempt}" if label else attempt
                    self._print(f"{name}: its stream begins; parts above are of an earlier attempt")
                    continue
                text = part.value if isinstance(part.value, str) else json.dumps(part.value)
                shown = output.line(text, PART_CHARACTERS)
                self._print(f"{label or attempt}: {output.line(part.name)}: {shown}".rstrip())
            full, self._after[job_id] = page.full, page.after


class _RunOutput(_Output):
    """Print what the handlers of a run print and stream.

    Their workers store the logs every two seconds. Each line of a stream starts with its node.
    `nodes`: only print these nodes, else all.
    """

    def __init__(
        self, run_id: str, print_line: Callable[[str], object], nodes: Sequence[str] | None = None
    ) -> None:
        super().__init__(print_line)
        self._run_id = run_id
        self._nodes = None if nodes is None else [*nodes]
        self._since: datetime | None = None
        self._begun = False

    def show(self, *, last: bool = False, without: Collection[str] = ()) -> None:
        """Print new output; with `last` also incomplete lines, and the output of an outage.

        Logs of the queues `without` are left out. Prints nothing while the database is away.
        """
        with contextlib.suppress(db.OperationalError):
            self._show_logs(last=last, without=without)
        with contextlib.suppress(db.OperationalError):
            self._show_streams(live=self._begun and not last)

    def _show_logs(self, *, last: bool, without: Collection[str]) -> None:
        since = None if last else self._since
        with db.transaction() as conn:
            jobs = statements.logs.nodes_that_logged(
                conn, run_id=self._run_id, since=since, nodes=self._nodes
            )
        if jobs:
            updated_at: datetime = jobs[-1]["updated_at"]
            self._since = updated_at
            with contextlib.suppress(OverflowError):  # not before Python's first time
                self._since = updated_at - _MARGIN
        names = {job["job_id"]: job["node_id"] for job in jobs if job["queue"] not in without}
        for at in range(0, len(names), run_views.AT_ONCE):
            some = [*names][at : at + run_views.AT_ONCE]
            with db.transaction() as conn:
                logs = statements.logs.of_jobs(conn, jobs=some, table=job_tables.NODE_JOBS.name)
            for log in sorted(logs, key=lambda log: (some.index(log["job_id"]), log["claim_no"])):
                self._show_log(names[log["job_id"]], log, last=last)

    def _show_streams(self, *, live: bool) -> None:
        with db.transaction() as conn:
            found = statements.job_parts.streaming_nodes(
                conn, run_id=self._run_id, nodes=self._nodes, live=live
            )
        for row in found:
            job_id, label = row["job_id"], output.line(row["node_id"])
            claim_no, _, seq = self._after.get(job_id, "0-0").partition("-")
            is_shown = (int(claim_no), int(seq)) >= (row["claim_no"], row["seq"])
            if not is_shown:
                with contextlib.suppress(errors.UnknownJob):  # deleted meanwhile
                    self._show_stream(job_id, label)
        self._begun = True


class Follower(NamedTuple):
    """Settings for following a run; `yes`: take default answers, else ask on the terminal."""

    view: run_views.View
    stop: signals.StopRequest
    tick: Callable[[run_views.RunSnapshot], object] = lambda _: None
    yes: bool = False
    printing_queues: Callable[[], Collection[str]] | None = None
    """Queues whose handlers print to our terminal themselves; without it no output is shown."""
    nodes: Sequence[str] | None = None
    """The nodes whose output is shown, else all."""
    asks: bool = True
    """Whether its questions are asked here."""

    def follow(self, run_id: str) -> run_views.RunSnapshot | None:
        """Follow the run and return it when it is over.

        Returns None if asked to stop, or if the reader of stdout is gone. `tick` is called with
        every picture. Raises `UnknownJob` if the run is deleted meanwhile, and what `tick` raises.
        """
        reader = run_views.Reader(run_id)
        seen: run_views.RunSnapshot | None = None
        settled: set[str] = set()
        tick_s = FIRST_TICK_S
        printed, printed_at = _RunOutput(run_id, self.view.print_message, self.nodes), -math.inf
        try:
            while not self.stop.requested.is_set():
                begun = time.monotonic()
                seen = reader.read()
                read_s = time.monotonic() - begun
                pause_s = TICK_LARGE_S
                if seen is not None:
                    self.view.show(seen)
                    if seen.over:
                        self._show_last(printed, read_s)
                        return seen
                    if time.monotonic() - printed_at >= OUTPUT_S and self.printing_queues:
                        printed_at = time.monotonic()
                        printed.show(without=self.printing_queues())
                    self.tick(seen)
                    for node in seen.questions if self.asks else ():
                        self._settle(run_id, node, settled)
                    pause_s = TICK_S if seen.total <= texts.SMALL else TICK_LARGE_S
                self.stop.requested.wait(min(tick_s, pause_s))
                tick_s *= TICK_GROWS
        except BrokenPipeError as error:
            # The reader of stdout is gone, so stop as on Ctrl-C, and report it on stderr.
            entry_point.lost_output(error)
            return seen if seen is not None and seen.over else None
        finally:
            reader.close()
        return None

    def _show_last(self, printed: _RunOutput, read_s: float) -> None:
        """Print the rest of the output, once the workers have had time to store the logs."""
        if self.printing_queues is None:
            return
        without = self.printing_queues()
        if not without:
            _await_logs(self.stop, read_s)
        printed.show(last=True, without=without)

    def _settle(self, run_id: str, node: Row, settled: set[str]) -> None:
        """Answer a question once; try again while the database is away."""
        if node["id"] in settled:
            return
        settled.add(node["id"])
        try:
            if not self._answer(run_id, node):
                answers = display.answer_command(run_id, node["node_id"])
                how = display.line(f"`{answers}` answers it", 500)
                prompt = output.line(node["input_spec"].get("prompt") or "")
                where = output.line(node["node_id"])
                self.view.print_message(f"{where} waits for an answer; {how}: {prompt}")
        except db.OperationalError as error:
            settled.discard(node["id"])
            self.view.print_message(output.line(f"the answer waits for the database: {error}"))

    def _answer(self, run_id: str, node: Row) -> bool:
        """Answer a question; return False if nobody here can answer it."""
        where, value = output.line(node["node_id"]), None
        if not self.yes:
            if not sys.stdin.isatty():
                return False
            with self.view.aside():
                answered, value = answer.ask(node, self.stop)
            if not answered:
                return self.stop.requested.is_set()
        try:
            if self.yes:
                value = answer.default(node["input_spec"])
            runs.answer(run_id, node["node_id"], value)
        except errors.InputRefused as error:  # of a person: another one was first
            text = f"{where} is not answered: {error}" if self.yes else str(error)
            self.view.print_message(output.line(text, 300))
            return not self.yes
        if self.yes:
            self.view.print_message(output.line(f"answered {where}: {output.compact(value)}", 300))
        return True


def exit_code(seen: run_views.RunSnapshot | None) -> int:
    """Return 0 for a completed run, 1 for a failed or cancelled one, 130 if left before."""
    if seen is None:
        return exit_codes.INTERRUPTED
    return exit_codes.DONE if seen.run["status"] == "completed" else exit_codes.FAILED


def finish(seen: run_views.RunSnapshot, *, as_json: bool, debug: bool = False) -> int:
    """Report how the run ended, and its errors; return the exit code. `debug`: whole tracebacks."""
    found = run_views.summary(seen.run["id"])
    if as_json:
        output.dump(found)
    else:
        run_views.print_summary(found)
        run_views.show_traces(found, whole=debug)
    return exit_code(seen)


def left(kind: str, any_id: str, *, stopped: bool = False) -> int:
    """Report that a run or job goes on without this command; return the exit code.

    `stopped`: the processes that it had started for the run were stopped.
    """
    shown, word = output.line(any_id), output.line(shlex.quote(any_id), None)
    text = (
        f"stopped the view of {kind} {shown}, which continues: `{command.PROG} show {word} "
        "--follow` shows it again"
    )
    if stopped:
        text = (
            f"stopped the processes that this command started; left {kind} {shown} as it is: "
            f"`{command.PROG} up` with its app continues it"
        )
    command.print_message(f"{text}, `{command.PROG} cancel {word}` ends it")
    return exit_codes.INTERRUPTED


def _await_logs(stop: signals.StopRequest, read_s: float) -> None:
    """Wait until workers have stored the logs of ended jobs; a read took `read_s` seconds."""
    stop.requested.wait(min(max(LAST_S, LAST_READS * read_s), LAST_MAX_S))


class _JobOutput(_Output):
    """Print new events of the attempts of one job, their logs and its stream."""

    def __init__(self, kind: str, job_id: str, print_line: Callable[[str], object]) -> None:
        super().__init__(print_line)
        self._kind, self._job_id = kind, job_id
        self._source = run_views.Source()
        self.close = self._source.close
        self._printed: set[tuple[int, int]] = set()
        self._status = ""

    def show(self, *, last: bool = False) -> JsonDict | None:
        """Print and return the job as it is now; None while the database is away.

        Raises `UnknownJob` if it is gone.
        """
        if (found := self._source.fetch(self._read)) is None:
            return None
        shown, by_claim = found
        if shown["status"] != self._status:
            self._status = shown["status"]
            if self._status not in TERMINAL_JOB_STATUSES:
                again = texts.again_text(shown, shown["attempts_failed"])
                text = f"{self._status}, {again}" if again else self._status
                name = output.line(texts.name_of(shown))
                self._print(f"{self._kind} {self._job_id} ({name}): {text}")
        for attempt in shown["attempts"]:
            self._show_attempt(attempt, by_claim.get(attempt["claim_no"]), last=last)
        with contextlib.suppress(db.OperationalError):
            self._show_stream(self._job_id)
        return shown

    def _read(self, conn: db.Connection) -> tuple[JsonDict, dict[int, Row]]:
        """Return the job, and the logs of its attempts by their numbers."""
        table = job_tables.NODE_JOBS if self._kind == "node job" else job_tables.INGEST_JOBS
        shown = history.get_job(self._job_id, conn=conn)
        if shown is None:
            raise errors.UnknownJob(f"{self._kind} {self._job_id!r} is gone")
        logs = statements.logs.of_jobs(conn, jobs=[self._job_id], table=table.name)
        return shown, {log["claim_no"]: log for log in logs}

    def _show_attempt(self, attempt: JsonDict, log: Row | None, *, last: bool) -> None:
        number = attempt["claim_no"]
        name = f"attempt {number}"
        fresh = [e for e in enumerate(attempt["events"]) if (number, e[0]) not in self._printed]
        self._printed.update((number, index) for index, _ in fresh)
        rest = [event for _, event in fresh if event["event_type"] != "claimed"]
        for _ in range(len(fresh) - len(rest)):
            self._print(f"{name}: {texts.place_text(attempt)}")
        if log is not None:
            self._show_log(name, log, last=last)
        for event in rest:
            self._print(f"{name}: {texts.event_text(event)}")


def job(
    kind: str, job_id: str, print_line: Callable[[str], object], stop: signals.StopRequest
) -> JsonDict | None:
    """Follow a job and return it when it is over, as `history.get_job` does; None as in `run`.

    Raises `UnknownJob` if the job is deleted meanwhile.
    """
    printed = _JobOutput(kind, job_id, print_line)
    try:
        while not stop.requested.is_set():
            begun = time.monotonic()
            shown = printed.show()
            if shown is not None and shown["status"] in TERMINAL_JOB_STATUSES:
                _await_logs(stop, time.monotonic() - begun)
                return printed.show(last=True) or shown
            stop.requested.wait(TICK_LARGE_S)
    except BrokenPipeError as error:
        entry_point.lost_output(error)
    finally:
        printed.close()
    return None
