"""Every error that lazyckpt raises on purpose.

LazyCkptError (RuntimeError)
├── ConfigError (also ValueError)    a setting or an argument is invalid
├── ClosedError                      used after close(), or in a forked child
├── SaveError                        a checkpoint failed; nothing committed was touched
│   ├── NoSpaceError                 the file system is full, or would be
│   ├── SerializationError           an object in the state cannot be pickled or restored
│   ├── RankError                    a rank died, failed or disagreed, so no rank committed the checkpoint
│   └── TornSnapshotError            state changed while it was being copied
├── LoadError                        a file or folder cannot be read
│   ├── CorruptFileError             truncated, bit-flipped, or of another format than it claims
│   ├── ReadError                    the operating system did not let it be read; it may be whole
│   └── UnsupportedFormatError       well-formed, but of a kind lazyckpt does not handle
├── MirrorError                      a mirror did not get a checkpoint; it is durable where it was saved
└── RestoreError                     a checkpoint does not fit the tracked state, or none is left
"""

from __future__ import annotations

import copyreg
import errno
import os
from pathlib import Path
from typing import Any

_MAX_WHAT = 4000  # characters


class LazyCkptError(RuntimeError):
    """Base of all errors raised by lazyckpt.

    An error that is pickled, by multiprocessing for instance, comes back with its message, attributes and notes. It
    loses ``__cause__``, as every exception of Python does; the message tells the cause.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls __init__ with the message alone, and most of ours take more.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(LazyCkptError, ValueError):
    """A setting or an argument is invalid."""


class ClosedError(LazyCkptError):
    """The checkpointer was closed, or belongs to the parent of this forked process."""


class SaveError(LazyCkptError):
    """A checkpoint failed. What was committed before is untouched.

    Attributes: ``step`` (None for ``lazyckpt.save``) and ``path``, the place the checkpoint was meant for;
    the underlying error, if any, is ``__cause__``. With ``opening``, ``path`` is a folder that cannot be opened, and
    nothing is saved into it.
    """

    def __init__(
        self, what: str, *, path: str | os.PathLike[str], step: int | None = None, opening: bool = False
    ) -> None:
        self.what = what
        self.path = Path(path)
        self.step = step
        where = f"step {step}: {self.path}" if step is not None else str(self.path)
        failed = f"cannot open {where}" if opening else f"checkpoint not saved ({where})"
        super().__init__(f"{failed}: {what}")

    def raised_by(self, path: Path, step: int | None, *, failed: bool) -> None:
        """Adds to the message that a later save raises this error, and whether that save itself goes on."""
        it = path if step is None else f"step {step}"
        fate = f"could not save {it} either: the next call says why" if failed else f"saves {it} all the same"
        self.args = (f"{self}; the call that raises this {fate}",)


class NoSpaceError(SaveError):
    """The file system is full, or too small for this checkpoint."""


class SerializationError(SaveError):
    """An object in the state cannot be pickled, or ``restore()`` could not read it."""


class TornSnapshotError(SaveError):
    """A tensor changed between ``save()`` and the end of its copy; the checkpoint was discarded."""


class RankError(SaveError):
    """The ranks of a job did not agree on a checkpoint; every rank gets this error for it.

    ``rank`` is the rank that died, failed or disagreed, and ``what`` says how. ``agreeing_on`` names the subject if it
    was no checkpoint, in the folder ``path``.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        path: str | os.PathLike[str],
        step: int | None = None,
        agreeing_on: str | None = None,
    ) -> None:
        super().__init__(f"rank {rank} {what}", path=path, step=step)
        self.rank = rank
        if agreeing_on is not None:
            self.args = (f"{self.path}: the ranks do not agree on {agreeing_on}: {self.what}",)


class LoadError(LazyCkptError):
    """A file or folder cannot be read. ``path`` names it."""

    def __init__(self, what: str, *, path: str | os.PathLike[str]) -> None:
        self.what = what if len(what) <= _MAX_WHAT else f"{what[:_MAX_WHAT]}…"  # it may quote the file
        self.path: Any = path if "://" in os.fspath(path) else Path(path)
        super().__init__(f"{self.path}: {self.what}")


class CorruptFileError(LoadError):
    """The file is truncated, has a flipped bit, or is of another format than it claims."""


class ReadError(LoadError):
    """The operating system did not let a file or folder be read. It may be whole. ``errno`` says why."""

    def __init__(self, what: str, *, path: str | os.PathLike[str], errno: int) -> None:
        self.errno = errno
        super().__init__(what, path=path)


class UnsupportedFormatError(LoadError):
    """The file is of a kind that lazyckpt does not read or write."""


class MirrorError(LazyCkptError):
    """A mirror did not get a checkpoint, which is durable where it was saved. ``mirror`` is its URL or folder."""

    def __init__(self, what: str, *, mirror: str, step: int | None = None) -> None:
        self.what = what
        self.mirror = mirror
        self.step = step
        super().__init__(f"{mirror}: {'' if step is None else f'step {step}: '}{what}")


class RestoreError(LazyCkptError):
    """A checkpoint does not fit the tracked state, or no valid one is left."""


def load_error(what: str, error: OSError, *, path: str | os.PathLike[str]) -> LoadError:
    """The typed error for an error of the operating system while reading."""
    what = f"{what}: {error.strerror} ({error.errno})"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG):  # nothing is there
        return LoadError(what, path=path)
    return ReadError(what, path=path, errno=error.errno or 0)


def save_error(
    error: OSError, *, path: str | os.PathLike[str], step: int | None = None, opening: bool = False
) -> SaveError:
    """The typed error for an error of the operating system while saving."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"{error.strerror}; free some space, or keep fewer checkpoints (keep_last)"
        return NoSpaceError(what, path=path, step=step, opening=opening)
    where = f" ({error.filename})" if error.filename and str(error.filename) != os.fspath(path) else ""
    return SaveError(f"{error.strerror or error}{where}", path=path, step=step, opening=opening)


def described(error: BaseException) -> str:
    """The cause without the path, for the message of another rank, which names the path itself."""
    if isinstance(error, SaveError):
        return error.what
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)
