"""Return what the input `ret` holds, write files, or raise."""

import time

from tests.oracle.app import note

ERRORS = {
    "V": ValueError, "K": KeyError, "R": RuntimeError, "T": TypeError, "O": OSError,
    "TO": TimeoutError,
}  # fmt: skip


def run(inputs, out=None):
    note("gen", inputs)
    if inputs.get("sleep"):
        time.sleep(inputs["sleep"])
    if inputs.get("file") and out:
        for name in inputs["file"]:
            (out / name).write_text("x" * 7)
    if inputs.get("raise"):
        raise ERRORS[inputs["raise"]](f"boom ż {inputs.get('who')}")
    return inputs.get("ret", {"v": 1})
