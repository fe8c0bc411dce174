"""Start a worker with executors whose own process has a defence switched off too.

Such a worker does not load the app, which is where the others switch it off.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    from queue_workflows import claim_worker
    from queue_workflows.worker import parent
    from tests.soak import app, mutants

    parent.WORKER = "tests.soak.mutated_worker"
    mutants.switch_off(os.environ[app.MUTANT_ENV])
    raise SystemExit(claim_worker.main())
