"""The node modules of the recorded workflows."""
