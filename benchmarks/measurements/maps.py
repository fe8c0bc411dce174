"""Measure a map of 1,000 and of 10,000 items beside static fans of the same sizes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import processes, results
from benchmarks.bench import Bench
from benchmarks.measurements import fan
from queue_workflows import db

ABOUT = """A run of one node that returns a list of N items, a map with one node for each of them,
and a join, with `queue-orchestrator` and two cpu workers. The time is from the COMMIT of
`insert_run` to the start of the join's handler. Here the column `bare` has the time of a fan of the
same size (see `fan`), measured alternately with the map. The ratio is to that time. A map of 10,000
items (not with `--quick`) shows that an item does not cost more in a larger map. For this map the
ratio is the time per item at 10,000 divided by the time per item at 1,000."""

PEER_ITEMS = 500
"""Items for the libraries compared with, whose rate is per item; of ours the map of 1,000."""


def run(bench: Bench) -> Iterator[results.Row | results.PeerRow]:
    """Yield maps beside fans."""
    commands = (
        ("orchestrator", processes.orchestrator()),
        ("cpu", processes.worker("cpu")),
        ("cpu", processes.worker("cpu")),
    )
    with (
        bench.server.database("map") as dsn,
        db.connect(limited=False) as conn,
        bench.running(dsn, *commands) as started,
    ):
        fan.seconds(conn, 20, started)
        fan.seconds(conn, 20, started, "map")
        small: list[float] = []
        for size in (fan.SMALL,) if bench.quick else (fan.SMALL, fan.LARGE):
            fans: list[float] = []
            maps: list[float] = []
            for _ in bench.rounds(5 if size == fan.SMALL else 3, 3, full_s=40, quick_s=10):
                fans.append(fan.seconds(conn, size, started))
                maps.append(fan.seconds(conn, size, started, "map"))
            small = small or maps
            yield results.Row(
                f"map of {size:,} to join, 2 workers",
                results.middle(maps),
                "s",
                results.middle(fans),
                results.paired(maps, fans),
                results.at_most(1.2),
                f"the other figure is a static fan of {size:,}",
            )
    if not bench.quick:
        scale = fan.SMALL / fan.LARGE
        yield results.Row(
            "an item in a map of 10,000 to one in a map of 1,000",
            results.middle(maps) / fan.LARGE * 1000,
            "ms",
            results.middle(small) / fan.SMALL * 1000,
            [one * scale / results.middle(small) for one in maps],
            results.at_most(1.3),
            f"the other figure is an item at {fan.SMALL:,}",
        )
    for peer in bench.peers("map"):
        value = peer.call("map", bench.pick(PEER_ITEMS, 100))
        rate = fan.SMALL / results.middle(small)
        yield results.PeerRow("map and join, items", peer.title, value, "/s", rate)
