"""Prepares the folder of a run for saves."""

from __future__ import annotations

from lazyckpt.errors import save_error
from lazyckpt.storage import commit, folders, removal
from lazyckpt.storage.catalog import Catalog
from lazyckpt.warn import warn


def prepare(catalog: Catalog, *, sweeps: bool) -> None:
    """Makes the folder if it is missing. ``sweeps``: also removes what dead processes left there, and tries to write.

    Raises SaveError if the folder cannot be written to. If it holds checkpoints, that is a warning instead."""
    root = catalog.root
    try:
        folders.make_folder(root)
        if sweeps:
            removal.sweep(root)
            commit.Staging(root / "writable").discard()
    except OSError as error:
        if not catalog.holds_any():
            raise save_error(error, path=root, opening=True) from error
        warn(f"{root}: {error.strerror}; restore() works there, save() does not")
