"""The version, for those who must not import the face of the package."""

__version__ = "0.1.0"
