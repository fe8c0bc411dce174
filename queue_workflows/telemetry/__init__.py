"""What a worker can learn about its own use of the machine."""
