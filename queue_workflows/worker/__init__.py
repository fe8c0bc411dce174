"""Everything around one running job: its lease, its guards, its end."""
