"""The gate in front of what writes to training state: it waits until the bytes to be written are copied."""
