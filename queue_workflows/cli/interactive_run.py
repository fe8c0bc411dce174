"""Follow a run for `queue-workflows run`: show it, ask its questions, check its processes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from queue_workflows import db, errors, runs
from queue_workflows.cli import follow, output, prompts, run_snapshot, run_views
from queue_workflows.runtime import display, entry_point, signals
from queue_workflows.types import Row

FIRST_TICK_S = 0.02
TICK_GROWS = 1.15
TICK_S = 0.2
TICK_LARGE_S = 0.5
"""Seconds between two looks at a run: few at first, as it may be short, then as many as its size
allows."""
OUTPUT_S = 0.5
"""Seconds between two reads of what handlers print and stream, at least."""


class Follower(NamedTuple):
    """Settings for following a run; `yes`: take default answers, else ask on the terminal."""

    view: run_views.View
    stop: signals.StopRequest
    tick: Callable[[run_snapshot.RunSnapshot], object] | None
    yes: bool = False
    printing_queues: Callable[[], Collection[str]] | None = None
    """Queues whose handlers print to our terminal themselves; None: no output is shown."""

    def follow(self, run_id: str) -> run_snapshot.RunSnapshot | None:
        """Follow the run and return it when it is over.

        Returns None if asked to stop, or if the reader of stdout is gone. `tick` is called with
        every picture. Raises `UnknownJob` if the run is deleted meanwhile, and what `tick` raises.
        """
        reader = run_snapshot.Reader(run_id)
        seen: run_snapshot.RunSnapshot | None = None
        settled: set[str] = set()
        tick_s = FIRST_TICK_S
        printed, printed_at = follow.RunOutput(run_id, self.view.print_message), -math.inf
        try:
            while not self.stop.requested.is_set():
                begun = time.monotonic()
                seen = reader.read()
                read_s = time.monotonic() - begun
                pause_s = TICK_LARGE_S
                if seen is not None:
                    self.view.show(seen)
                    if self.printing_queues is not None and seen.over:
                        self._show_last(printed, self.printing_queues(), read_s)
                    elif (
                        self.printing_queues is not None
                        and time.monotonic() - printed_at >= OUTPUT_S
                    ):
                        printed_at = time.monotonic()
                        printed.show(without=self.printing_queues())
                    if seen.over:
                        return seen
                    if self.tick is not None:
                        self.tick(seen)
                    for node in seen.questions:
                        self._settle(run_id, node, settled)
                    pause_s = TICK_S if seen.total <= run_snapshot.SMALL else TICK_LARGE_S
                self.stop.requested.wait(min(tick_s, pause_s))
                tick_s *= TICK_GROWS
        except BrokenPipeError as error:
            # The reader of stdout is gone: stop as on Ctrl-C, and report it on stderr.
            entry_point.lost_output(error)
            return seen if seen is not None and seen.over else None
        finally:
            reader.close()
        return None

    def _show_last(
        self, printed: follow.RunOutput, printing_queues: Collection[str], read_s: float
    ) -> None:
        """Print the rest of the output, once the workers have had time to store the logs."""
        if not printing_queues:
            follow.await_logs(self.stop, read_s)
        printed.show(last=True, without=printing_queues)

    def _settle(self, run_id: str, node: Row, settled: set[str]) -> None:
        """Answer a question once; try again while the database is away."""
        if node["id"] in settled:
            return
        settled.add(node["id"])
        try:
            self._answer(run_id, node)
        except db.OperationalError as error:
            settled.discard(node["id"])
            self.view.print_message(output.line(f"the answer waits for the database: {error}"))

    def _answer(self, run_id: str, node: Row) -> None:
        """Answer a question, or report one that nobody here can answer."""
        where = output.line(node["node_id"])
        if self.yes:
            try:
                value = prompts.default(node["input_spec"])
                runs.answer(run_id, node["node_id"], value)
            except errors.InputRefused as error:
                self.view.print_message(output.line(f"{where} is not answered: {error}", 300))
                self._print_answer_command(run_id, node)
            else:
                text = f"answered {where}: {output.compact(value)}"
                self.view.print_message(output.line(text, 300))
            return
        if not sys.stdin.isatty():
            self._print_answer_command(run_id, node)
            return
        with self.view.aside():
            answered, value = prompts.ask(node, self.stop)
        if not answered and not self.stop.requested.is_set():
            self._print_answer_command(run_id, node)
        if answered and (refused := prompts.submit(run_id, node["node_id"], value)):
            self.view.print_message(output.line(refused, 300))

    def _print_answer_command(self, run_id: str, node: Row) -> None:
        prompt = output.line(node["input_spec"].get("prompt") or "")
        how = display.line(f"`{display.answer_command(run_id, node['node_id'])}` answers it", 500)
        where = output.line(node["node_id"])
        self.view.print_message(f"{where} waits for an answer; {how}: {prompt}")


def exit_code(seen: run_snapshot.RunSnapshot | None) -> int:
    """Return 0 for a completed run, 1 for a failed or cancelled one, 130 if left before."""
    if seen is None:
        return entry_point.INTERRUPTED
    return 0 if seen.run["status"] == "completed" else 1
