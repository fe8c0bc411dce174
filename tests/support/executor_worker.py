"""Run a worker process without a database, for tests that kill or stop it: `python -m` this.

It starts a launcher and executors that run handlers for ever, prints the pids as JSON, and then
moves the deadline of the executors until it is requested to stop that.
"""

from __future__ import annotations

import json
import sys
import time

from queue_workflows.executor import launcher_client, process, protocol
from queue_workflows.runtime import clock
from tests.support import executor_app, executors


def main(count: int, task: str, lease_s: float) -> None:
    """Start, print the pids, and hold the executors for `lease_s` again and again."""
    assert launcher_client.why_not() is None
    launcher = launcher_client.Launcher.start(process.App(executor_app.load))
    launcher.wait_loaded()
    if lease_s:
        launcher.hold_until(clock.boot_s() + lease_s + 2)  # the reply to a fork shows it is set
    found = [launcher.fork() for _ in range(count)]
    for each in found:
        each.jobs.send(protocol.Run(1, "ingest", executors.task_row(task, {"s": 3600}), None))
    pids = {"launcher": launcher.pid, "executors": [each.pid for each in found]}
    print(json.dumps(pids), flush=True)
    while True:
        for died in launcher.receive():
            print(json.dumps(died._asdict()), flush=True)
        if lease_s:
            launcher.hold_until(clock.boot_s() + lease_s)
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
