"""Tell the app about failed runs, jobs and schedules: by its hook, and by a command."""
