"""Places for checkpoints that fsspec opens: an FTP server, a folder, and an object store."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

PASSWORD = "password-of-tests"


class Folders(LocalFileSystem):  # type: ignore[misc]
    """Folders of this machine by name."""

    protocol = "folders"
    roots: ClassVar[dict[str, Path]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if path.startswith("folders://"):
            name, _, below = path.removeprefix("folders://").partition("/")
            path = f"{cls.roots[name]}/{below}"
        return str(super()._strip_protocol(path))


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    """An object, which appears when it is closed."""

    def _initiate_upload(self) -> None:
        self._sent = io.BytesIO()

    def _upload_chunk(self, final: bool = False) -> bool:
        self._sent.write(self.buffer.getvalue())
        if final:
            self.fs.objects.pipe_file(self.path, self._sent.getvalue())
        return True

    def discard(self) -> None:
        pass


class Objects(MemoryFileSystem):  # type: ignore[misc]
    """Like the file systems of fsspec for object stores."""

    protocol = "objects"
    async_impl = True
    objects = MemoryFileSystem()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode, **options) if mode == "rb" else _Upload(self, path, mode)


@dataclass
class Files:
    """A place of its own in a folder of this machine."""

    base: str
    root: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def url(self, key: str = "run") -> str:
        return f"{self.base}/{key}"

    def names(self) -> list[str]:
        found = [Path(folder, name) for folder, _, names in os.walk(self.root) for name in names]
        return sorted(str(path.relative_to(self.root)) for path in found)

    def body(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def put(self, key: str, body: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(body)

    def delete(self, key: str) -> None:
        (self.root / key).unlink()


@dataclass
class InMemory:
    """A place of its own in the memory of this process."""

    base: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def url(self, key: str = "run") -> str:
        return f"{self.base}/{key}"

    def names(self) -> list[str]:
        return sorted(name.removeprefix(f"{self.base}/") for name in Objects.objects.find(self.base))

    def body(self, key: str) -> bytes:
        return bytes(Objects.objects.cat_file(self.url(key)))

    def put(self, key: str, body: bytes) -> None:
        Objects.objects.pipe_file(self.url(key), body)

    def delete(self, key: str) -> None:
        Objects.objects.rm_file(self.url(key))


class FTPServer:
    """pyftpdlib's, in this process."""

    def __init__(self, root: Path) -> None:
        from pyftpdlib.authorizers import DummyAuthorizer
        from pyftpdlib.handlers import FTPHandler
        from pyftpdlib.servers import ThreadedFTPServer

        self.root = root
        self.login = {"username": "tests", "password": PASSWORD}
        logging.getLogger("pyftpdlib").setLevel(logging.CRITICAL)
        self.authorizer = DummyAuthorizer()
        self.authorizer.add_user("tests", PASSWORD, str(root), perm="elradfmwMT")

        handlers = self._handlers = weakref.WeakSet[Any]()

        class Handler(FTPHandler):  # type: ignore[misc]
            authorizer = self.authorizer
            auth_failed_timeout = 0

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                handlers.add(self)

        self._server = ThreadedFTPServer(("127.0.0.1", 0), Handler)
        self.base = f"ftp://127.0.0.1:{self._server.address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"timeout": 0.05}, daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """Closes every connection, as servers do with those that are idle."""
        for handler in list(self._handlers):
            with contextlib.suppress(OSError, AttributeError):
                handler.socket.shutdown(socket.SHUT_RDWR)

    def allow(self, rights: str) -> None:
        """Replaces the user's rights, as pyftpdlib names them."""
        self.authorizer.user_table["tests"]["perm"] = rights

    def close(self) -> None:
        self.hang_up()
        self._server.close_all()
        self._thread.join(10)
