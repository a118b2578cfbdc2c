"""From a URL to its store."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from lazyckpt.errors import ConfigError
from lazyckpt.stores.store import Store, StorePath, opened_stores
from lazyckpt.stores.watched import Watched

OBJECT_STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PORT = re.compile(r":[0-9]{1,5}$")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib takes one of the two slashes


def is_url(path: object) -> TypeGuard[str]:
    """Whether this is the text of a URL, and not a path."""
    return isinstance(path, str) and _URL.match(path) is not None


def located(path: str | os.PathLike[str]) -> Path | StorePath:
    """The path that a path or a URL names. Raises ConfigError for a URL that lazyckpt cannot read."""
    if isinstance(path, StorePath) or not is_url(text := os.fspath(path)):
        return path if isinstance(path, StorePath) else Path(path)
    url = checked(text)
    if url.startswith("file://"):
        return Path(unquote(url.removeprefix("file://")))
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return StorePath(_of_bucket(f"{scheme}://{bucket}"), key)


def checked(url: str) -> str:
    """The URL without a slash at the end. Raises ConfigError, which does not quote credentials."""
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower()
    if scheme == "hf":
        raise ConfigError(
            "hf://…: a repository of the Hub holds no checkpoints to resume from; it takes weights: "
            "Mirror(…, what='model')"
        )
    of_fsspec = scheme not in (*OBJECT_STORES, "file")
    if of_fsspec and scheme not in _protocols():
        known = ", ".join(f"{name}://" for name in (*OBJECT_STORES, "file"))
        raise ConfigError(f"{scheme}://…: expected one of {known}, a protocol of fsspec, or a path")
    if not rest.startswith("//"):
        raise ConfigError(
            f"{scheme}:/…: a URL has two slashes behind {scheme}:, and pathlib takes one away; give a str"
        )
    place = urlsplit(url).netloc
    if of_fsspec and (":" in _PORT.sub("", place) or "@" in url):
        raise ConfigError(
            f"{scheme}://…: the URL holds credentials, which would end up in logs; leave them to options, or to the "
            f"environment (FSSPEC_{scheme.upper()}_USERNAME, …)"
        )
    if not of_fsspec and scheme != "file" and (":" in place or ("@" in place and scheme not in ("abfs", "abfss"))):
        raise ConfigError(  # a secret may hold a slash, so no part of the URL is shown
            f"{scheme}://…: the URL holds credentials, which would end up in logs, or a port; leave credentials to the "
            "environment (AWS_ACCESS_KEY_ID, …) or to options, and give a server as the option endpoint"
        )
    if not of_fsspec and scheme != "file" and not place:
        raise ConfigError(f"{url}: expected the name of a bucket behind {scheme}://")
    if "?" in url or "#" in url:
        raise ConfigError(f"{url.partition('?')[0]}: the URL has a query or a fragment; give options instead")
    return url.rstrip("/").replace("s3a://", "s3://", 1)


def hub_repository(url: str) -> str | None:
    """The repository that ``hf://org/model`` names; None for other URLs. Raises ConfigError for one that names none."""
    if not url.lower().startswith("hf:"):
        return None
    name = url.partition(":")[2].strip("/")
    if not url[3:].startswith("//") or not _REPOSITORY.fullmatch(name):
        raise ConfigError("hf://…: expected hf://organization/model")  # it may hold credentials
    return name


def _protocols() -> set[str]:
    """Those of fsspec."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError as error:
        raise ConfigError("this kind of URL needs fsspec: pip install fsspec") from error
    return {*known_implementations, *registry}


@functools.cache
def _of_bucket(url: str) -> Store:
    return opened(url)


def opened(url: str, options: Mapping[str, Any] | None = None) -> Store:
    """The store at a URL that ``checked`` has passed. Raises ConfigError for an option that it does not know, and if
    a package is missing."""
    is_object_store = url.partition("://")[0] in OBJECT_STORES
    opened_stores[url] = store = Watched((_of_obstore if is_object_store else _of_fsspec)(url, options))
    return store


def _of_obstore(url: str, options: Mapping[str, Any] | None) -> Store:
    try:
        from lazyckpt.stores.objects import ObjectStore
    except ImportError as error:
        raise ConfigError(f"{url}: object stores need obstore: pip install 'lazyckpt[s3]'") from error
    try:
        return ObjectStore(url, options)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None


def _of_fsspec(url: str, options: Mapping[str, Any] | None) -> Store:
    from lazyckpt.stores.filesystems import FileSystemStore

    try:
        return FileSystemStore(url, options)
    except ImportError as error:
        raise ConfigError(f"{url}: fsspec needs a package for this protocol: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from error
