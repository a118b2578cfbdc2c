"""The gate: code that writes to training state waits there until the bytes are copied."""

from lazyckpt import private_names

private_names.check("python", "torch")
