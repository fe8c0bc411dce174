"""Run `python -m tests.gpu` on this machine's GPU; without one, print the reason and skip."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from queue_workflows import db
from queue_workflows.runtime import external_tool
from tests.gpu import app, checks, gpu_worker, simulated_gpu
from tests.support import constants, database

PACE = {
    "QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S": "5",
    **constants.env({"worker.guards.STALL_TIMEOUT_S": 20}),
    app.SLOW_S: "150",
    app.BUSY_S: "40",
}
"""Settings of the worker on a real GPU."""
QUICK = {
    "QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S": "0.5",
    **constants.env({"worker.guards.STALL_TIMEOUT_S": 1}),
    "QUEUE_WORKFLOWS_STALL_CONFIRM_POLL_S": "0.1",
    app.SLOW_S: "3",
    app.BUSY_S: "0.3",
}
"""And on a pretended one."""
NEEDED_MB = app.LARGE_MB + 2048


def missing() -> str | None:
    """Return why there is nothing to check here; None if there is a GPU and torch."""
    names = external_tool.Tool("nvidia-smi").ask(
        "--query-gpu=name", "--format=csv,noheader", timeout_s=10.0
    )
    if not (names.text or "").strip():
        return names.problem or "nvidia-smi lists no GPU"
    try:
        import torch
    except ImportError:
        return "no torch for this Python"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    free_mb = torch.cuda.mem_get_info()[0] >> 20
    if free_mb < NEEDED_MB:
        return f"{free_mb} MB free on {torch.cuda.get_device_name()}, {NEEDED_MB} needed"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every check passes or all are skipped with a reason, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="on a simulated GPU, quickly")
    options = parser.parse_args(argv)
    if not options.pretend and (why := missing()):
        print(f"skipped: {why}")
        return 0
    with contextlib.ExitStack() as stack:
        url = os.environ.get("QUEUE_WORKFLOWS_TEST_DB_URL")
        dsn = database.forced(url) if url else stack.enter_context(database.throw_away_server())
        own = stack.enter_context(database.Database(dsn))
        stack.enter_context(database.environment(QUEUE_WORKFLOWS_DB_URL=own.dsn))
        db.bootstrap()
        stack.callback(db.close_pool)
        env = PACE
        if options.pretend:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            env = pretended(folder)
            stack.enter_context(database.environment(PATH=env["PATH"]))
        return 0 if check(env) else 1


def pretended(folder: Path) -> dict[str, str]:
    """Return the environment of a worker on a simulated GPU made of files in this folder."""
    tools = simulated_gpu.install(folder)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**QUICK, app.VARIABLE: str(folder), "PATH": path}


def check(env: dict[str, str], *, patience_s: float = gpu_worker.PATIENCE_S) -> bool:
    """Start the worker with these knobs and do every check; whether all hold."""
    with gpu_worker.Bench(env, patience_s=patience_s) as made:
        todo = checks.Checks(made, slow_s=float(env[app.SLOW_S]))
        return checks.run(todo, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
