"""A server that speaks as much S3 as a mirror needs, and keeps objects in memory, in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000  # objects of one listing
OPTIONS = {"access_key_id": "benchmark", "secret_access_key": "benchmark", "region": "us-east-1"}


class Objects:
    """What the bucket holds, by name, and the parts of uploads, by id and number."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: Objects

    def _begin(self) -> tuple[str, dict[str, str], bytes]:
        self.objects.requests += 1
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return unquote(parts.path).lstrip("/").partition("/")[2], query, body

    def _answer(self, status: int, body: bytes | memoryview = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        name, query, body = self._begin()
        if "uploadId" in query:
            self.objects.uploads[query["uploadId"]][int(query["partNumber"])] = body
        elif self.headers.get("If-None-Match") == "*" and name in self.objects.bodies:
            return self._answer(412)
        else:
            self.objects.bodies[name] = body
        self._answer(200, ETag=tag(body))

    def do_POST(self) -> None:
        name, query, _ = self._begin()
        if "uploads" in query:
            number = hashlib.md5(f"{name}{len(self.objects.uploads)}".encode()).hexdigest()
            self.objects.uploads[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        elif "delete" in query:
            text = "<DeleteResult></DeleteResult>"
        else:
            parts = self.objects.uploads.pop(query["uploadId"])
            self.objects.bodies[name] = b"".join(parts[number] for number in sorted(parts))
            whole = tag(self.objects.bodies[name])
            text = f"<CompleteMultipartUploadResult><ETag>{whole}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text.encode())

    def do_GET(self) -> None:
        name, query, _ = self._begin()
        if not name and "list-type" in query:
            return self._list(query)
        body = self.objects.bodies.get(name)
        if body is None:
            return self._answer(404)
        headers = {"ETag": tag(body), "Last_Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        if asked := self.headers.get("Range"):
            begin, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1, len(body))
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
            return self._answer(206, memoryview(body)[int(begin) : end], **headers)
        self._answer(200, body, **headers)

    def do_HEAD(self) -> None:
        name, *_ = self._begin()
        body = self.objects.bodies.get(name)
        if body is None:
            return self._answer(404)
        self._answer(200, ETag=tag(body), Last_Modified="Sun, 01 Nov 2026 00:00:00 GMT", Content_Length=str(len(body)))

    def _list(self, query: dict[str, str]) -> None:
        after, prefix = query.get("continuation-token", ""), query.get("prefix", "")
        names = sorted(name for name in self.objects.bodies if name.startswith(prefix) and name > after)
        page, more = names[:PAGE], len(names) > PAGE
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-01T00:00:00.000Z</LastModified>"
            f"<ETag>{tag(self.objects.bodies[name])}</ETag><Size>{len(self.objects.bodies[name])}</Size></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = str(more).lower()
        text = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{rows}</ListBucketResult>"
        self._answer(200, text.encode())

    def log_message(self, *_: object) -> None:
        pass


def tag(body: bytes) -> str:
    """Cheap: the length, and the sum of a few bytes."""
    return f'"{len(body)}-{hashlib.md5(body[:512]).hexdigest()}"'


def _serve(pipe: Connection) -> None:
    Handler.objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    with contextlib.suppress(EOFError):
        while True:
            given = pipe.recv()
            Handler.objects.bodies |= given
            pipe.send(Handler.objects.requests)


class ObjectServer:
    """The server; ``options`` are those of a Mirror."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.options = {**OPTIONS, "endpoint": f"http://127.0.0.1:{self._pipe.recv()}"}

    def put(self, objects: dict[str, bytes]) -> int:
        """Adds objects; returns how many requests there were so far."""
        self._pipe.send(objects)
        return int(self._pipe.recv())

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()
