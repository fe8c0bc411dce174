"""Every statement of the engine. Each function takes a connection and never opens one."""
