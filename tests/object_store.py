"""A server that speaks S3, and a proxy in front of it that fails as networks and services do."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": "secret-of-tests", "AWS_REGION": REGION}


@dataclass
class Asked:
    """A request that came to the proxy."""

    method: str
    path: str  # with the query
    body: bytes = field(repr=False)
    at: float = field(default_factory=time.monotonic)
    by: str = ""  # the access key
    conditional: bool = False  # put only what does not exist


@dataclass
class Fault:
    """What happens to requests that ``matches``, the next ``times`` of them."""

    how: str  # "status", "reset", "truncate", "stall"
    matches: Callable[[Asked], bool]
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    seen: threading.Event = field(default_factory=threading.Event)  # set when it has happened
    over: threading.Event = field(default_factory=threading.Event)  # ends a stall


class Proxy:
    """Forwards requests to the server, except those that a fault meets."""

    def __init__(self, host: str, port: int) -> None:
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                credential = re.search(r"Credential=([^/]*)/", self.headers.get("Authorization") or "")
                once = "If-None-Match" in self.headers
                asked = Asked(self.command, self.path, body, by=credential[1] if credential else "", conditional=once)
                fault = proxy._next(asked)
                if fault is not None and fault.how != "truncate":
                    return self._fail(fault)
                upstream = http.client.HTTPConnection(host, port, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                data = answer.read()
                upstream.close()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(data if fault is None else data[: len(data) // 2])
                if fault is not None:
                    fault.seen.set()
                    self._reset()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

            def _fail(self, fault: Fault) -> None:
                if fault.how == "stall":
                    fault.seen.set()
                    fault.over.wait(60)
                if fault.how in ("reset", "stall"):
                    fault.seen.set()
                    return self._reset()
                text = f'<?xml version="1.0"?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>'
                self.send_response_only(fault.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else text.encode())
                fault.seen.set()

            def _reset(self) -> None:
                """Closes with RST, so that the client sees no clean end."""
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.connection.close()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def inject(self, how: str, matches: Callable[[Asked], bool] = lambda asked: True, **about: Any) -> Fault:
        """The next requests that match meet this fault."""
        fault = Fault(how, matches, **about)
        with self._lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """From now on every request is forwarded."""
        with self._lock:
            faults, self.faults = self.faults, []
        for fault in faults:
            fault.over.set()

    def _next(self, asked: Asked) -> Fault | None:
        with self._lock:
            self.asked.append(asked)
            for fault in self.faults:
                if fault.times > 0 and fault.matches(asked):
                    fault.times -= 1
                    return fault
        return None

    def close(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()


@dataclass
class S3:
    """A bucket of its own, and the proxy on the way to it."""

    bucket: str
    proxy: Proxy
    client: Any  # boto3's, past the proxy

    def url(self, key: str = "run") -> str:
        return f"s3://{self.bucket}/{key}"

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint": self.proxy.endpoint}

    def names(self) -> list[str]:
        """Of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def body(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=key)


class Server:
    """moto's, in this process."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.host, self.port = self._moto.get_host_and_port()
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://{self.host}:{self.port}",
            aws_access_key_id="key-of-tests",
            aws_secret_access_key="secret-of-tests",
            region_name=REGION,
        )

    @contextlib.contextmanager
    def bucket(self) -> Iterator[S3]:
        name = f"bucket-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=name)
        proxy = Proxy(self.host, self.port)
        try:
            yield S3(name, proxy, self.client)
        finally:
            proxy.close()

    def close(self) -> None:
        self._moto.stop()
