"""Dispatch runs: plan the next nodes of a run, and act on the events of the outbox."""
