"""The measurements: each module has `ABOUT` and `run(bench)`, which yields rows when measured."""
