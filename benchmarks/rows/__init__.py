"""The measurements: each module has `ABOUT` and `run(bench)`, which yields rows as they are done."""
