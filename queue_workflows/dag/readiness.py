"""Find the ready nodes of a run, at a cost that does not grow with their dependencies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from queue_workflows.dag import graph

END = ""


class Truth(Protocol):
    """Read a run's nodes from the database."""

    def done_among(self, ids: Collection[str]) -> set[str]:
        """Return those of these node ids that are completed or skipped."""
        ...


class Progress:
    """What one process knows of a run's generation: a cache of facts that never become false.

    Of each waiting node only the last dependency not known to be done is queried. When that one is
    done, the next one is searched, from there backwards. So each process may keep its own cache,
    and learns of each node once. Drop it if a transaction that used it rolls back. `END`
    stands for the run's end, which waits for the leaves.
    """

    __slots__ = ("_at", "graph", "known")

    def __init__(self, of: graph.Graph) -> None:
        self.graph = of
        self.known: set[str] = set()
        self._at: dict[str, int] = {}

    def deps(self, node_id: str) -> tuple[str, ...]:
        """Return the dependencies of a node, or of `END`."""
        return self.graph.leaves if node_id == END else self.graph.nodes[node_id].deps

    def last_open(self, node_id: str) -> int:
        """Return the position of the last dependency not known to be done; -1 if there is none."""
        deps, known = self.deps(node_id), self.known
        at = self._at.get(node_id, len(deps) - 1)
        while at >= 0 and deps[at] in known:
            at -= 1
        self._at[node_id] = at
        return at

    def waits_for_more(self, *node_ids: str) -> bool:
        """Return whether every node after these is known to wait for others too."""
        return all(
            self._waits_besides(follower, node_ids)
            for node_id in node_ids
            for follower in self.graph.downstream(node_id) or (END,)
        )

    def _waits_besides(self, follower: str, node_ids: tuple[str, ...]) -> bool:
        deps, at = self.deps(follower), self.last_open(follower)
        while at >= 0 and (deps[at] in node_ids or deps[at] in self.known):
            at -= 1
        return at >= 0


class Round:
    """One plan's view of a run: `Progress`, and what the plan itself has skipped."""

    def __init__(self, progress: Progress, truth: Truth | None) -> None:
        self.progress = progress
        self.truth = truth
        self.skipped: set[str] = set()
        self.learned = False
        self._undone: set[str] = set()
        self._at: dict[str, int] = {}

    def ready(self, candidates: Iterable[str]) -> list[str]:
        """Return those whose every dependency is done or skipped here, in the given order.

        One `done_among` queries the last open dependency of each node at once. If it is done, the
        next call queries twice as many dependencies of that node.
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
            if asked:
                done = self.truth.done_among(asked) if self.truth else set[str]()
                self.progress.known |= done
                self.learned = self.learned or bool(done)
                self._undone |= asked - done
            waiting, width = open_nodes, width * 2
        return [node_id for node_id in candidates if node_id not in blocked]

    def _window(self, node_id: str, width: int) -> list[str]:
        """Return the dependencies from the last open one backwards that may be open.

        [] if it is ready.
        """
        progress, deps = self.progress, self.progress.deps(node_id)
        at = progress.last_open(node_id)
        if self.skipped:
            at = min(at, self._at.get(node_id, at))
            while at >= 0 and (deps[at] in progress.known or deps[at] in self.skipped):
                at -= 1
            self._at[node_id] = at
        window = deps[max(0, at - width + 1) : at + 1]
        return [dep for dep in window if dep not in progress.known and dep not in self.skipped]
