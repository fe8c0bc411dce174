"""Read-only diagnostics: what the commands for operators find out; nothing here changes a row."""
