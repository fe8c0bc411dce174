"""Export the history of jobs and runs: spans for OpenTelemetry, the audit log, the metric log."""
