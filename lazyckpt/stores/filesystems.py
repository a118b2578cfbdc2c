"""File systems of fsspec: SFTP, FTP, WebDAV, HDFS and whatever else has a protocol there.

A file is written under a temporary name and then renamed. Only object stores, whose files appear when they are
complete, are written to directly. Nothing here is exclusive: ``create`` looks, then renames.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from ftplib import Error as FTPError
from ftplib import error_perm
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.spec import AbstractFileSystem

from lazyckpt.errors import ConfigError
from lazyckpt.stores.replies import code_of, told_of
from lazyckpt.stores.store import Entry, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_CONNECTIONS = 4  # servers limit those of one client
_LOOKS = 3  # before a refusal is believed: files are renamed and removed meanwhile
_TEMPORARY = ".tmp-"
_TIMES = ("mtime", "modified", "modify", "LastModified", "last_modified", "updated", "created")
_TAGS = ("etag", "ETag", "e_tag", "ino", "generation", "md5Hash")


class FileSystemStore(Store):
    """The files below a URL. ``options``: the arguments of fsspec's file system for this protocol.

    Opens no connection. Raises ValueError if fsspec does not know the protocol, ImportError if it needs a package."""

    looks_first = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url if url.endswith("://") else url.rstrip("/")
        self._options = dict(options or {})
        fsspec.get_filesystem_class(url.partition("://")[0])
        self._idle: list[tuple[Any, str]] = []  # file systems, each with the path of the URL; one thread uses one
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._process: int | None = None  # that has connected

    def read(self, name: str, begin: int, end: int) -> Buffer:
        if begin == end:
            return b""
        found = self._content(name, begin, end)
        if len(found) != end - begin:
            raise OSError(errno.EIO, f"the server sent {len(found)} bytes of {end - begin}", self._of(name))
        return found

    def whole(self, name: str, most: int) -> bytes:
        nbytes, found = self.entry(name).nbytes, b""
        if nbytes <= most:
            found = self._content(name, None, None)  # another file may have its name now
            nbytes = len(found)
        if nbytes > most:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, where at most {most} are expected", self._of(name))
        return found

    def _content(self, name: str, begin: int | None, end: int | None) -> bytes:
        def cat(fs: Any, path: str) -> bytes:
            return bytes(fs.cat_file(path, start=begin, end=end))

        for _ in range(_LOOKS - 1):
            with contextlib.suppress(PermissionError):
                return self._ask(name, cat)
            self.entry(name)  # FTP has one reply for a file without rights, and for one that was just removed
        return self._ask(name, cat)

    def entry(self, name: str) -> Entry:
        return _entry(name, self._ask(name, lambda fs, path: fs.info(path)))

    def entries(self, folder: str = "") -> list[Entry]:
        return self._ask(folder, lambda fs, path: [_entry(name, info) for name, info in _walk(fs, path, folder)])

    def label(self, name: str) -> str:
        self.entry(name)
        return ""  # files have no metadata of ours

    def write(self, name: str, parts: Iterable[Buffer], nbytes: int, label: str = "") -> None:
        raised: list[Exception] = []  # by ``parts``

        def guarded() -> Iterator[Buffer]:
            try:
                yield from parts
            except Exception as error:
                raised.append(error)
                raise

        try:
            with self._connected(name) as (fs, path):
                _write(fs, path, guarded())
        except (OSError, ConfigError):
            if raised:
                raise raised[0] from None
            raise

    def create(self, name: str, data: bytes) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.entry(name)
            return False
        self.write(name, [data], len(data))
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._connected(name) as (fs, path):
                if _info(fs, path) is not None:
                    fs.rm_file(path)
                    if "/" in name:
                        _remove_if_empty(fs, path.rpartition("/")[0])

    def _of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _ask(self, name: str, act: Callable[[Any, str], T]) -> T:
        """Returns what ``act`` returns for a file system and the path of ``name`` there. Tries again if the server has
        closed the connection: it does that to those that were idle for minutes."""
        try:
            with self._connected(name) as (fs, path):
                return act(fs, path)
        except ConnectionError:
            with self._connected(name) as (fs, path):
                return act(fs, path)

    @contextlib.contextmanager
    def _connected(self, name: str) -> Iterator[tuple[Any, str]]:
        """Yields a file system of which this thread is the only user, and the path of ``name`` there. Its errors become
        OSErrors that quote nothing: requests and options may hold credentials."""
        if self._process not in (None, os.getpid()):
            raise ConfigError(
                f"{self.url}: does not work in a forked child of a process that has used it; spawn it instead"
            )
        self._process = os.getpid()
        with self._free:
            used: list[tuple[Any, str]] = []
            try:
                used.append(self._idle.pop() if self._idle else self._connect())
                fs, root = used[0]
                fs.invalidate_cache()
                yield fs, _joined(root, name)
                self._idle += used
                return
            except ConfigError:
                raise
            except Exception as error:
                number, what = told_of(error)
                if number == errno.ENOENT:
                    self._idle += used
                else:
                    self._idle.clear()  # the others may be as dead as this one
        raise OSError(number, what, self._of(name))  # here: the original must not be its context

    def _connect(self) -> tuple[Any, str]:
        try:
            fs, root = url_to_fs(self.url, skip_instance_cache=True, **self._options)
        except (TypeError, ValueError) as error:
            names = ", ".join(self._options) or "none"
            raise ConfigError(
                f"{self.url}: fsspec does not take these options ({type(error).__name__}): {names}"
            ) from None
        return fs, root


def _joined(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if root and name else root or name


def _write(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    if fs.async_impl and type(fs).mv is AbstractFileSystem.mv:  # an object store
        return _fill(fs, path, parts)
    folder, _, last = path.rpartition("/")
    if folder:
        try:
            fs.makedirs(folder, exist_ok=True)
        except Exception:
            if _info(fs, folder) is None:
                raise  # else another process has just made it
    temporary = f"{folder}/{_TEMPORARY}{last}-{uuid.uuid4().hex}"
    try:
        _fill(fs, temporary, parts)
        try:
            fs.mv(temporary, path)
        except Exception:
            if _info(fs, path) is None:
                raise
            fs.rm_file(path)  # a server that does not rename to a name that exists
            fs.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def _fill(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    """Makes a file of these parts. One that is not complete does not appear in an object store."""
    file = fs.open(path, "wb")
    try:
        if (pipelined := getattr(file, "set_pipelined", None)) is not None:
            pipelined(True)  # paramiko would wait for an answer every 32 KiB
        for part in parts:
            file.write(part)
        file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            file.closed = True  # or the collector would complete it
        raise


def _walk(fs: Any, path: str, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the files below a folder with their names below the URL. ``find`` of fsspec would pass over folders that
    cannot be read."""
    for info in _listed(fs, path):
        last = str(info["name"]).rstrip("/").rpartition("/")[2]
        name = f"{folder}/{last}" if folder else last
        if info["type"] == "file":
            yield name, info
        elif info["type"] == "directory" and not info.get("islink"):
            yield from _walk(fs, _joined(path, last), name)


def _listed(fs: Any, path: str) -> list[dict[str, Any]]:
    """The contents of a folder; none if it is missing. Looks again before it believes a refusal: FTP gives the same
    answer for a folder without rights, and for one that is removed or renamed meanwhile."""
    for _ in range(_LOOKS - 1):
        try:
            return _looked(fs, path)
        except Exception as error:
            if told_of(error)[0] != errno.EACCES and code_of(error) != 450:
                raise
            fs.invalidate_cache()
    return _looked(fs, path)


def _looked(fs: Any, path: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = fs.ls(path, detail=True)
    except FileNotFoundError as error:
        if told_of(error)[0] != errno.ENOENT:
            raise
        found = []
    if not found and isinstance(fs, FTPFileSystem):
        _check_empty(fs, path)
    return found


def _check_empty(fs: Any, path: str) -> None:
    """Raises the error of the server, which fsspec takes for an empty folder, unless there is no such folder."""
    try:
        fs.ftp.nlst(path)
    except FTPError as error:
        if code_of(error) != 550:
            raise
        try:
            fs.ftp.cwd(path)
        except error_perm:
            return
        raise PermissionError from error


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    fs.invalidate_cache()
    try:
        found: dict[str, Any] = fs.info(path)
        return found
    except FileNotFoundError as error:
        if told_of(error)[0] != errno.ENOENT:
            raise
        return None


def _remove_if_empty(fs: Any, folder: str) -> None:
    fs.invalidate_cache()
    with contextlib.suppress(Exception):  # object stores have no folders
        if not fs.ls(folder, detail=False):
            fs.rmdir(folder)


def _entry(name: str, info: Mapping[str, Any]) -> Entry:
    told = next((info[key] for key in _TIMES if info.get(key)), None)
    modified = None if told is None else _seconds(told)
    nbytes = int(info["size"] or 0)
    versions = [str(info[key]) for key in _TAGS if info.get(key)]
    tag = "-".join([name, str(nbytes), str(told if modified is None else modified), *versions])
    return Entry(name, nbytes, tag, time.time() if modified is None else modified)  # not removed as old if unknown


def _seconds(when: Any) -> float | None:
    """As time.time(); None if it cannot be told."""
    with contextlib.suppress(ValueError):
        if isinstance(when, str):
            digits = when.partition(".")[0]
            if len(digits) == 14 and digits.isdigit():  # of FTP, which are UTC
                when = datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)
            else:
                when = datetime.fromisoformat(when.replace("Z", "+00:00"))
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return None
