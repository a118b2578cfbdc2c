"""Checks the paths that users give."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from lazyckpt.errors import ConfigError, SaveError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib takes one of the two slashes


def local(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path, which ``os.chdir()`` does not move. Raises ConfigError for an empty path, for a URL,
    and for an object that is no path."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise ConfigError(f"{path!r} is no path; give a str or a pathlib.Path")
    if not text:
        raise ConfigError('"" is no path; "." is the working folder')
    refuse_url(text)
    return Path(text).absolute()


def as_given(path: str | os.PathLike[str]) -> Path:
    """Returns the path, relative or not. Raises ConfigError for a URL."""
    refuse_url(os.fspath(path))
    return Path(path)


def refuse_url(text: str) -> None:
    """Raises ConfigError for a URL."""
    if _URL.match(text):
        raise ConfigError(
            f"{text}: URLs are not supported; save to a local or mounted file system, and copy from there "
            f"(a folder of this name is {os.path.join('.', text)})"
        )


def refuse_special_file(target: Path) -> None:
    """Raises SaveError for a device, a pipe or a socket: a save would replace it by a file."""
    try:
        mode = os.lstat(target).st_mode
    except OSError:
        return
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise SaveError("there is a device, a pipe or a socket, which a save would replace", path=target)


def is_alias(entry: Path) -> bool:
    """Whether it links to an entry of its own folder, as last.ckpt does. The links of a Hugging Face cache lead out."""
    if not os.path.islink(entry):
        return False
    return os.path.realpath((entry.parent / os.readlink(entry)).parent) == os.path.realpath(entry.parent)
