"""Name the exit codes of the commands; docs/exit-codes.md is made of the text below each."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
"""The command has done it, or the process was stopped. A worker hands back jobs that run on."""
FAILED: Final = 1
"""The command has not done it, has found a problem, or met an unexpected error. It prints which."""
REFUSED: Final = 2
"""Wrong usage, or refused input. One line on stderr gives the reason; a restart does not help."""
BUDGET: Final = 75
"""A job ran past its time limit, or a model that was requested took too long to load.

A node is queued again, and fails after WATCHDOG_MAX_RETRIES. An ingest job fails.
"""
STALL: Final = 76
"""A gpu handler that reported progress stopped, and samples show no activity. Outcome as for 75."""
LOST: Final = 77
"""The claim was lost, or its lease could not be renewed in time.

If the handler ran in an executor and the claim is still held, the job is handed back uncounted.
Otherwise nothing is written, as another worker has the job, or will have it.
"""
GPU_HEALTH: Final = 78
"""The GPU was idle for a whole window in which memory did not change. Outcome as for 75."""
CONTROL: Final = 79
"""The worker was turned OFF by policy `hard`, or a cancelled handler ran past CANCEL_GRACE_S.

The job is queued again uncounted, or is cancelled.
"""
INTERRUPTED: Final = 130
"""Ctrl-C ended the command. The run or request that it waited for remains."""
