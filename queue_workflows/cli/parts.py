"""Print what handlers stream, for `show --follow`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

from queue_workflows import db, errors, streams
from queue_workflows.cli import output
from queue_workflows.db import statements

PART_CHARACTERS = 1000


class Parts:
    """Print the parts of jobs, each once and in order."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._after: dict[str, str] = {}

    def show(self, job_id: str, label: str = "") -> None:
        """Print what the handler has streamed since the last call; `label`: stands before it.

        Without a label the attempt does. Raises `UnknownJob` if the job is gone.
        """
        full = True
        while full:
            page = streams.read_page(job_id, after=self._after.get(job_id))
            for part in page.parts:
                self._print(_line(part, label))
            full, self._after[job_id] = page.full, page.after

    def has(self, job_id: str, place: tuple[int, int]) -> bool:
        """Return whether the part at this place, or a later one, was printed."""
        claim_no, _, seq = self._after.get(job_id, "0-0").partition("-")
        return (int(claim_no), int(seq)) >= place


class RunParts:
    """Print what the nodes of a run stream, each line after the node.

    `nodes`: only of these; None: of all.
    """

    def __init__(
        self, run_id: str, print_line: Callable[[str], object], nodes: Sequence[str] | None = None
    ) -> None:
        self._run_id = run_id
        self._nodes = nodes
        self._print = print_line
        self._parts = Parts(print_line)
        self._begun = False
        self._unreadable: set[str] = set()

    def show(self, *, last: bool = False) -> None:
        """Print what is new; `last`: also of nodes that ended while the database was away.

        Prints nothing while it is.
        """
        live = self._begun and not last
        with contextlib.suppress(db.OperationalError):
            with db.transaction() as conn:
                found = statements.job_parts.streaming_nodes(
                    conn,
                    run_id=self._run_id,
                    nodes=None if self._nodes is None else [*self._nodes],
                    live=live,
                )
            for row in found:
                if not self._parts.has(row["job_id"], (row["claim_no"], row["seq"])):
                    self._show(row["job_id"], output.line(row["node_id"]))
            self._begun = True

    def _show(self, job_id: str, label: str) -> None:
        if job_id in self._unreadable:
            return
        try:
            self._parts.show(job_id, label)
        except errors.UnknownJob:
            return  # deleted meanwhile
        except errors.UnreadableRow as error:
            self._unreadable.add(job_id)
            self._print(f"{label}: its stream cannot be shown: {output.line(str(error), 200)}")


def _line(part: streams.Part, label: str) -> str:
    attempt = f"attempt {part.claim_no}"
    if part.is_reset:
        name = f"{label}: {attempt}" if label else attempt
        return f"{name}: its stream begins, what came before is of an earlier one"
    text = part.value if isinstance(part.value, str) else json.dumps(part.value)
    shown = output.line(text, PART_CHARACTERS)
    return f"{label or attempt}: {output.line(part.name)}: {shown}".rstrip()
