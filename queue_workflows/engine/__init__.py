"""Every state change, once, for both job families: each function takes a connection, opens none."""
