"""Read what operators' commands diagnose and display; nothing here changes a row."""
