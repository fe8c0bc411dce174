"""Send alerts of failed runs, jobs and schedules to the app's hook, and to a command."""
