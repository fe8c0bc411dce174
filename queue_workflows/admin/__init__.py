"""Read the facts that operators' commands diagnose and display; no row is changed here."""
