"""Start runs and advance them by the events of the outbox; retry, upgrade and schedule them."""
