"""Periodic tasks of the orchestrator: recover claims, end waits, repair queues, raise flags."""
