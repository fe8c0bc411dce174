"""Start and supervise threads and processes, and handle signals; nothing else starts either."""
