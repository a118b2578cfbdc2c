"""The gate: code that writes to training state waits there until the bytes are copied."""
