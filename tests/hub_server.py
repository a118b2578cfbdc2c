"""A server that speaks what huggingface_hub asks of the Hub to create, read and commit to a repository."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token-of-tests"


@dataclass
class Commit:
    """What one commit has made of a repository."""

    message: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        told = [self.message, *(f"{name} {hashlib.sha1(self.files[name]).hexdigest()}" for name in sorted(self.files))]
        return hashlib.sha1("\n".join(told).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {".gitattributes": b"x"})])


class HubServer:
    """Holds repositories in memory. Files of more than 1 KB are LFS objects."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # of LFS, by SHA-256
        self.asked: list[str] = []
        self.refused: dict[str, int] = {}  # the status for requests whose path has this part
        self.held = threading.Event()  # of requests to commit
        self.held.set()
        self._committing: list[str] = []  # names
        self._ended = threading.Event()
        self._lost = False
        self.reached = threading.Event()  # a request to commit has come
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _do(self) -> None:
                body = self._body()
                path = unquote(urlsplit(self.path).path)
                hub.asked.append(f"{self.command} {path}")
                if (status := next((s for part, s in hub.refused.items() if part in path), None)) is not None:
                    return self._answer(status, {"error": "refused"})
                if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self._answer(401, {"error": "Invalid username or password."})
                self._answer(*hub.answer(self.command, path, body, self.headers["Host"]))

            do_GET = do_PUT = do_POST = do_HEAD = _do

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = b""
                while nbytes := int(self.rfile.readline(), 16):
                    found += self.rfile.read(nbytes)
                    self.rfile.readline()
                self.rfile.readline()
                return found

            def _answer(self, status: int, told: Any) -> None:
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response_only(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: bytes, host: str) -> tuple[int, Any]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, act = "/".join(parts[2:4]), parts[4:]
        else:
            name, act = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        repository = self.repositories[name]
        last = repository.commits[-1]
        if act == [] or act[0] == "revision":
            return 200, {"id": name, "sha": last.sha, "siblings": [{"rfilename": file} for file in last.files]}
        if act[0] == "preupload":
            sizes = {file["path"]: file["size"] for file in json.loads(body)["files"]}
            modes = [{"path": p, "uploadMode": _mode(p, n), "shouldIgnore": False} for p, n in sizes.items()]
            return 200, {"files": modes}
        if act[:2] == ["info", "lfs"]:
            return 200, {"transfer": "basic", "objects": [self._upload(o, host) for o in json.loads(body)["objects"]]}
        if act[0] == "commit":
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        if act[0] == "resolve" and (file := "/".join(act[2:])) in last.files:
            return 200, last.files[file]
        return 404, {"error": f"Entry not found: {path}"}

    def _create(self, told: dict[str, Any]) -> tuple[int, Any]:
        name = f"{told['organization']}/{told['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.endpoint}/{name}"}
        self.repositories[name] = Repository(told.get("visibility") == "private" or bool(told.get("private")))
        return 200, {"url": f"{self.endpoint}/{name}"}

    def _upload(self, wanted: dict[str, Any], host: str) -> dict[str, Any]:
        if wanted["oid"] in self.objects:
            return dict(wanted)
        return {**wanted, "actions": {"upload": {"href": f"http://{host}/objects/{wanted['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        self._committing.append(name)
        self.reached.set()
        self.held.wait(60)
        lost = self._lost
        self._committing.remove(name)
        if lost:
            return 503, {"error": "lost"}
        commits = self.repositories[name].commits
        header = lines[0]["value"]
        if header.get("parentCommit", commits[-1].sha) != commits[-1].sha:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(commits[-1].files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            else:
                del files[value["path"]]
        commits.append(Commit(header["summary"], files))
        return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/{commits[-1].sha}", "commitOid": commits[-1].sha}

    def checked_out(self, name: str, folder: Path) -> Path:
        """A folder with the files of a repository."""
        folder.mkdir(parents=True)
        for file, data in self.repositories[name].commits[-1].files.items():
            (folder / file).write_bytes(data)
        return folder

    def create(self, name: str, files: dict[str, bytes]) -> None:
        """Makes a repository with these files."""
        self.repositories[name] = Repository(False)
        self.repositories[name].commits[-1].files.update(files)

    def commit_beside(self, name: str, file: str, data: bytes) -> None:
        """Commits a file by other means."""
        commits = self.repositories[name].commits
        commits.append(Commit("by hand", {**commits[-1].files, file: data}))

    def lose_commits(self) -> None:
        """Ends the requests to commit that are held, as if they had never come, and holds no more."""
        self._lost = True
        self.held.set()
        while self._committing:
            self._ended.wait(0.01)
        self._lost = False

    def messages(self, name: str) -> list[str]:
        return [commit.message for commit in self.repositories[name].commits[1:]]

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()


def _mode(path: str, nbytes: int) -> str:
    return "lfs" if path.endswith(".safetensors") or nbytes > 1000 else "regular"
