"""The soak: run real processes under seeded faults, then compare journal and database."""
