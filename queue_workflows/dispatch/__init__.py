"""The dispatcher's wing: what a run knows, one plan at a time, and the outbox that drives it."""
