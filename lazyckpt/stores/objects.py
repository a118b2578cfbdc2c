"""Object stores, through obstore: S3 and what speaks its language, Google Cloud Storage, Azure, and memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from lazyckpt import waits
from lazyckpt.config import MIB
from lazyckpt.errors import ConfigError
from lazyckpt.stores.store import Entry, Store, UnlistableError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_used_by: int | None = None  # the process

PART_BYTES = 8 * MIB  # of an upload in parts
_MAX_PARTS = 10_000  # that S3 takes, so large objects have larger parts
_PARTS_IN_FLIGHT = 4
_LISTED = 1000  # objects of one answer
_LABEL = "lazyckpt"  # in the metadata of an object
_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_ODD = re.compile(r"[^_]path: (\".*?\"),\n")  # as Rust spells the name of an object
_MISSING = ("NoSuchKey", "NoSuchBucket", "ContainerNotFound", "BlobNotFound")
_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed")
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage")


class ObjectStore(Store):
    """The objects below a URL. ``options``: those of obstore for this kind of store, such as ``endpoint``.

    Raises ValueError for a URL or an option that obstore does not know."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self._heard = 0.0
        config: Any = dict(options or {})
        if self.url.startswith("memory://"):
            self._store: Any = _memory(self.url)
            return
        client: Any = {
            "connect_timeout": timedelta(seconds=waits.STORE_CONNECT_S),
            "read_timeout": timedelta(seconds=waits.STORE_SILENCE_S),
            "timeout": timedelta(seconds=waits.STORE_REQUEST_S),
        }
        endpoints = [*map(config.get, _ENDPOINT_OPTIONS), *map(os.environ.get, _ENDPOINT_VARIABLES)]
        if str(next(filter(None, endpoints), "")).startswith("http://"):  # asked for by name; otherwise TLS stays on
            client["allow_http"] = True
        retries: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=waits.STORE_RETRIES_S)}
        try:
            self._store = from_url(self.url, config=config or None, client_options=client, retry_config=retries)
        except BaseException as error:
            # obstore panics at some values, with an exception that is no Exception
            if not isinstance(error, exceptions.BaseError | TypeError) and type(error).__name__ != "PanicException":
                raise
            told = _first_line(error)
            if any(str(value) in told for value in config.values()):
                told = f"one of the options has a value that is not valid: {', '.join(config)}"
        else:
            return
        raise ValueError(told)

    @property
    def heard(self) -> float:
        return self._heard

    def read(self, name: str, begin: int, end: int) -> Buffer:
        if begin == end:
            return b""
        with self._errors(name):
            found = obstore.get_range(self._store, name, start=begin, end=end)
        if len(found) != end - begin:
            raise OSError(errno.EIO, f"the store sent {len(found)} bytes of {end - begin}", self._of(name))
        return found

    def stream(self, name: str, begin: int, end: int) -> Iterator[Buffer]:
        with self._errors(name):
            yield from obstore.get(self._store, name, options={"range": (begin, end)}).stream(min_chunk_size=0)

    def whole(self, name: str, most: int) -> bytes:
        with self._errors(name):
            found = obstore.get(self._store, name)
            if (nbytes := found.meta["size"]) <= most:
                return bytes(found.bytes())
        raise OSError(errno.EFBIG, f"{nbytes} bytes, where at most {most} are expected", self._of(name))

    def entry(self, name: str) -> Entry:
        with self._errors(name):
            return _entry(obstore.head(self._store, name))

    def entries(self, folder: str = "") -> list[Entry]:
        with self._errors(folder):
            found: list[Entry] = []
            for chunk in obstore.list(self._store, folder or None, chunk_size=_LISTED):
                self._heard = time.monotonic()
                found += map(_entry, chunk)
            return found

    def level(self, folder: str = "") -> tuple[list[Entry], list[str]]:
        with self._errors(folder):
            found = obstore.list_with_delimiter(self._store, folder or None)
        return list(map(_entry, found["objects"])), [str(name).rpartition("/")[2] for name in found["common_prefixes"]]

    def label(self, name: str) -> str:
        with self._errors(name):
            found = obstore.get(self._store, name, options={"head": True})
            return str(found.attributes.get(_LABEL, ""))

    def write(self, name: str, parts: Iterable[Buffer], nbytes: int, label: str = "") -> None:
        raised: list[Exception] = []  # by ``parts``, which obstore would wrap

        def guarded() -> Iterator[Buffer]:
            try:
                yield from parts
            except Exception as error:
                raised.append(error)
                raise

        try:
            with self._errors(name):
                obstore.put(
                    self._store,
                    name,
                    guarded(),
                    attributes={_LABEL: label} if label else None,
                    use_multipart=True,
                    chunk_size=max(PART_BYTES, -(-nbytes // _MAX_PARTS)),
                    max_concurrency=_PARTS_IN_FLIGHT,
                )
        except OSError:
            if raised:
                raise raised[0] from None
            raise

    def create(self, name: str, data: bytes) -> bool:
        if not self.looks_first:
            try:
                with self._errors(name):
                    obstore.put(self._store, name, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno != errno.ENOTSUP:
                    raise
                self.looks_first = True
            else:
                return True
        with contextlib.suppress(FileNotFoundError):
            self.entry(name)
            return False
        with self._errors(name):
            obstore.put(self._store, name, data)
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._errors(name):
                obstore.delete(self._store, name)

    def _of(self, name: str) -> str:
        return f"{self.url}/{name}"

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        _refuse_fork()
        try:
            yield
            return
        except exceptions.InvalidPathError as error:
            odd = found[1][:200] if (found := _ODD.search(str(error))) else "one of the objects there"
            what = f"{odd} has a name that cannot be read; rename or remove that object with the tools of the store"
            raise UnlistableError(errno.EINVAL, what, self._of(name)) from None
        except (exceptions.BaseError, ValueError, OSError, NotImplementedError) as error:
            number, what = _told(error)
        raise OSError(number, what, self._of(name))  # here: the original quotes requests, and must not be its context


def _refuse_fork() -> None:
    """Raises ConfigError in a forked child of a process that has used a store: the threads of obstore are not there, so
    the child would wait without end."""
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise ConfigError(
            "object stores do not work in a forked child of a process that has used one; spawn it instead"
        )
    _used_by = os.getpid()


@functools.cache
def _memory(url: str) -> MemoryStore:
    """The one of this process that has this URL."""
    return MemoryStore()


def _entry(meta: Any) -> Entry:
    tag = meta["e_tag"] or f"{meta['last_modified'].isoformat()}-{meta['size']}"
    return Entry(str(meta["path"]), int(meta["size"]), str(tag), meta["last_modified"].timestamp())


def _told(error: Exception) -> tuple[int, str]:
    """The errno and the reason of an error of obstore. Neither quotes what was sent, which may hold credentials."""
    text = str(error).partition("\n\nDebug source")[0]
    code = found[1] if (found := _CODE.search(text)) else ""
    status = found[1] if (found := _STATUS.search(text)) else ""
    said = f" ({code or f'status {status}'})" if code or status else ""
    if isinstance(error, FileNotFoundError) or code in _MISSING:
        return errno.ENOENT, f"there is no such object or bucket{said}"
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return errno.EEXIST, "there is an object of this name"
    if code in _FULL or status == "507":
        return errno.ENOSPC, f"the store is full{said}"
    if code == "NotImplemented" or status == "501" or isinstance(error, NotImplementedError):
        return errno.ENOTSUP, f"the store cannot do that{said}"
    refused = code in _REFUSED or (not code and status in ("401", "403"))
    if refused or isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return errno.EACCES, f"the credentials are missing, wrong, expired, or do not allow it{said}"
    if "timed out" in text or "timeout" in text.lower().partition("retry_timeout")[0]:
        return errno.ETIMEDOUT, "no answer in time"
    if "HTTP error" in text and not said:
        return errno.ECONNABORTED, "the connection failed"
    return errno.EIO, f"the request failed{said or f' ({type(error).__name__})'}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
