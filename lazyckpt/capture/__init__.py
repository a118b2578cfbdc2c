"""Decides which storages are copied lazily: which optimizer owns each, and whether it stayed unchanged."""

from lazyckpt import private_names

private_names.check("python", "torch")
