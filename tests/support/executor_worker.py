"""Run a worker process without a database, for tests that kill or stop it: `python -m` this.

It starts a launcher and executors that run handlers for ever, prints the pids as JSON, and then
moves the deadline of the executors until it is requested to stop that.
"""

from __future__ import annotations

import contextlib
import json
import sys

from queue_workflows.runtime import clock, forking
from tests.support import executor_app, executors


def main(count: int, task: str, lease_s: float) -> None:
    """Start, print the pids, and hold the executors for `lease_s` again and again."""
    assert forking.unsafe() is None
    with executors.launched(executor_app.load, alone=False) as found, contextlib.ExitStack() as own:
        if lease_s:
            # The reply to a fork shows that it is set.
            found.launcher.hold(clock.boot_s() + lease_s + 2)
        workers = [own.enter_context(executors.forked(found)) for _ in range(count)]
        for each in workers:
            each.send_task(task, {"s": 3600})
        pids = {"launcher": found.launcher.pid, "executors": [each.pid for each in workers]}
        print(json.dumps(pids), flush=True)
        known = len(found.packets)
        while True:
            for packet in found.packets[known:]:
                print(json.dumps(packet), flush=True)
            known = len(found.packets)
            if lease_s:
                found.launcher.hold(clock.boot_s() + lease_s)
            found.turn(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
