"""Which instants a schedule has, and which of them are due; pure."""
