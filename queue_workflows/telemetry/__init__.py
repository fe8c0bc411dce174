"""Measure the use of GPUs and memory, throttle by it, and describe metrics for Prometheus."""
