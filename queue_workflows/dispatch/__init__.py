"""Dispatch of runs: the knowledge of a run, one plan at a time, and the outbox that drives it."""
