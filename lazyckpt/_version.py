"""The version, for code that must not import ``lazyckpt`` itself."""

__version__ = "0.1.0"
