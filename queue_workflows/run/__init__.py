"""Run handlers in child processes, which load the app and hold no connection of the engine."""
