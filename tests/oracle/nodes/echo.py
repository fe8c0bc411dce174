"""Return the inputs."""

from tests.oracle.app import note


def run(inputs, out=None):
    note("echo", inputs)
    return {name: value for name, value in inputs.items() if name != "tag"}
