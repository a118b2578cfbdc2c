"""Places of each kind for a test."""

from object_fixtures import ftp, ftp_place, hub, place, s3, server

__all__ = ["ftp", "ftp_place", "hub", "place", "s3", "server"]
