"""Which nodes of a run are ready, at a cost that does not grow with their dependencies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from queue_workflows.dag import graph

END = ""


class Truth(Protocol):
    """What the database says about a run's nodes."""

    def done_among(self, ids: Collection[str]) -> set[str]:
        """Those of these node ids that are completed or skipped."""
        ...


class Progress:
    """What one process knows of a run's generation: a cache of truths that never turn false.

    Each waiting node has one witness, its last dependency not known to be done; only when the
    witness turns out done is the next one looked for, from there backwards. So all processes may
    keep their own, know different things, and each learns a node once. Drop it when a transaction
    that it was used in rolls back. `END` stands for the run's end, which waits for the leaves.
    """

    __slots__ = ("_at", "graph", "known")

    def __init__(self, of: graph.Graph) -> None:
        self.graph = of
        self.known: set[str] = set()
        self._at: dict[str, int] = {}

    def deps(self, node_id: str) -> tuple[str, ...]:
        """The dependencies of a node, or of `END`."""
        return self.graph.leaves if node_id == END else self.graph.nodes[node_id].deps

    def witness(self, node_id: str) -> int:
        """Position of the last dependency not known to be done; -1 when there is none."""
        deps, known = self.deps(node_id), self.known
        at = self._at.get(node_id, len(deps) - 1)
        while at >= 0 and deps[at] in known:
            at -= 1
        self._at[node_id] = at
        return at

    def waits_for_more(self, node_id: str) -> bool:
        """Whether all that follows a node waits, as far as is known, for others as well."""
        followers = self.graph.downstream(node_id) or (END,)
        return all(self._waits_besides(follower, node_id) for follower in followers)

    def _waits_besides(self, follower: str, node_id: str) -> bool:
        deps, at = self.deps(follower), self.witness(follower)
        while at >= 0 and (deps[at] == node_id or deps[at] in self.known):
            at -= 1
        return at >= 0


class Round:
    """The look at a run that one plan takes: `Progress`, and what the plan itself has skipped."""

    def __init__(self, progress: Progress, truth: Truth | None) -> None:
        self.progress = progress
        self.truth = truth
        self.skipped: set[str] = set()
        self.learned = False
        self._undone: set[str] = set()
        self._at: dict[str, int] = {}

    def ready(self, candidates: Iterable[str]) -> list[str]:
        """Those whose every dependency is done or skipped here, in the order given.

        One `done_among` asks for all witnesses at once; while a witness turns out done, twice as
        many dependencies of that node are asked for next.
        """
        candidates = list(candidates)
        blocked: set[str] = set()
        waiting, width = candidates, 1
        while waiting:
            asked: set[str] = set()
            open_nodes: list[str] = []
            for node_id in waiting:
                window = self._window(node_id, width)
                if self._undone.isdisjoint(window):
                    asked.update(window)
                    open_nodes += [node_id] if window else []
                else:
                    blocked.add(node_id)
            self._learn(asked)
            waiting, width = open_nodes, width * 2
        return [node_id for node_id in candidates if node_id not in blocked]

    def _window(self, node_id: str, width: int) -> list[str]:
        """The dependencies from the witness backwards that may be open; [] when it is ready."""
        progress, deps = self.progress, self.progress.deps(node_id)
        at = progress.witness(node_id)
        if self.skipped:
            at = min(at, self._at.get(node_id, at))
            while at >= 0 and (deps[at] in progress.known or deps[at] in self.skipped):
                at -= 1
            self._at[node_id] = at
        window = deps[max(0, at - width + 1) : at + 1]
        return [dep for dep in window if dep not in progress.known and dep not in self.skipped]

    def _learn(self, asked: set[str]) -> None:
        if not asked:
            return
        done = self.truth.done_among(asked) if self.truth else set[str]()
        self.progress.known |= done
        self.learned = self.learned or bool(done)
        self._undone |= asked - done
