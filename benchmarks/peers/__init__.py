"""Other queues from the package index, each in its own environment, driven by one small file each."""
