"""Read-only diagnostics for operators' commands; nothing here changes a row."""
