"""The soak: real processes under seeded faults, and a checker that compares journal and database."""
