"""Hold 457 workflows and how 0.3.0 ended each of them; `README.md` says how they came about."""
