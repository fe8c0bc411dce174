"""Measure one thing per module; each has `ABOUT` and `run(bench)`, which yields rows."""
