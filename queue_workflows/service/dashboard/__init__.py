"""Show runs, failures, workers and questions as pages of the service (extra: dashboard)."""
