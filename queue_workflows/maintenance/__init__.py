"""Run the orchestrator's periodic tasks: recover claims, end waits, repair queues, set flags."""
