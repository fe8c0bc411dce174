"""Threads, signals, processes and their supervisor: the only place that starts either."""
