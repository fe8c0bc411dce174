"""The endpoints of the service, a module for each noun."""
