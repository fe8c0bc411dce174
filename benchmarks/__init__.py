"""What the engine costs, each figure beside a bare psycopg loop of the same run. Not shipped."""
