"""The report: what it says (`contents`), in which pieces (`blocks`), and how they are shown."""
