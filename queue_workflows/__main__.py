"""Run the command `queue-workflows` as `python -m queue_workflows`; it needs the extra `cli`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence

from queue_workflows.runtime import forking

_EXTRA = ("typer", "rich")
_CLI = "queue_workflows.cli"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 and one line if the extra `cli` is missing."""
    if argv is None:
        forking.note_command()
    try:
        return _main(argv)
    except KeyboardInterrupt:
        # Ctrl-C while the commands are imported, before any of them could handle it.
        return 130


def _main(argv: Sequence[str] | None) -> int:
    fresh = _CLI not in sys.modules and gc.isenabled()
    try:
        if fresh:
            gc.disable()  # nothing that is imported becomes garbage: a third of the time goes there
        # By name: the commands are in a layer above this module, and may be absent.
        cli = importlib.import_module(_CLI)
        cli.load(argv)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"queue-workflows: {error.name} is not installed: pip install 'SOURCE[cli]' "
            "(SOURCE is the checkout or wheel of queue_workflows)\n"
        )
        return 2
    finally:
        if fresh:
            gc.freeze()
            gc.enable()
    return int(cli.main(argv))


if __name__ == "__main__":
    sys.exit(main())
