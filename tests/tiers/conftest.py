"""A bucket of its own for each test."""

from object_fixtures import s3, server

__all__ = ["s3", "server"]
