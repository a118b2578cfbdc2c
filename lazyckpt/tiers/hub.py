"""A repository of the Hugging Face Hub, which gets the weights of a model: one commit for each publication."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyckpt.errors import ConfigError, LoadError, MirrorError
from lazyckpt.storage.manifest import NO_STEP, Checkpoint, FileEntry
from lazyckpt.tiers.tier import Parts, Tier

if TYPE_CHECKING:
    from lazyckpt.tiers.others import Others

NOTE = "lazyckpt.json"  # which run and checkpoint the weights are of
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_OPTIONS = ("endpoint", "token", "private")
_MAX_NOTE_BYTES = 4096


class Hub(Tier):
    """The repository ``organization/model``. Uses the token of the environment, as huggingface_hub does."""

    def __init__(self, repository: str, options: Mapping[str, Any]) -> None:
        """Opens no connection. Raises ConfigError without huggingface_hub, and for an option that it does not know."""
        try:
            from huggingface_hub import HfApi, get_session  # the latter since 1.0
        except ImportError as error:
            raise ConfigError(
                f"hf://{repository}: the Hub needs huggingface_hub: pip install 'lazyckpt[hf]'"
            ) from error
        if unknown := options.keys() - set(_OPTIONS):
            raise ConfigError(f"hf://{repository}: options: {', '.join(unknown)}: expected {', '.join(_OPTIONS)}")
        self._api = HfApi(endpoint=options.get("endpoint"), token=options.get("token"), library_name="lazyckpt")
        self._session = get_session
        self._private = options.get("private")
        self._repository = repository
        self._place = f"hf://{repository}"
        self._run = ""
        self.broken: list[LoadError] = []

    def run(self) -> str | None:
        told = self._note()
        return None if told is None else str(told["run"])

    def belong(self, run: str) -> str:
        with self._errors():
            self._api.create_repo(self._repository, private=self._private, exist_ok=True)
        self._run = self.run() or run
        return self._run

    def claim(self) -> None:
        pass  # a commit names the one before it, so the Hub refuses that of a second process in the same moment

    def release(self) -> None:
        pass

    def checkpoints(self) -> list[Checkpoint]:
        return []  # the Hub keeps them all

    def has(self, step: int, sequence: int) -> bool:
        told = self._note()
        return told is not None and (told.get("step"), told.get("sequence")) == (step, sequence)

    def upload(self, checkpoint: Checkpoint, text: bytes, parts: Parts, others: Others | None = None) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        digest = f"{zlib.crc32(repr(sorted(checkpoint.files)).encode()):08x}"
        note = {"run": self._run, "step": checkpoint.step, "sequence": checkpoint.sequence, "files": digest}
        told = self._note()
        if told is not None and (told.get("step"), told.get("files")) == (checkpoint.step, digest):
            return  # a trainer's, published before this process was started
        with self._errors(), _without_bars():
            there = self._api.repo_info(self._repository)
            base, names = Path(os.fspath(checkpoint.base)), {file.name for file in checkpoint.files}
            stale = [s.rfilename for s in there.siblings or () if _OURS.fullmatch(s.rfilename)]
            self._api.create_commit(
                self._repository,
                [
                    *(CommitOperationAdd(name, str(base / name)) for name in sorted(names)),
                    CommitOperationAdd(NOTE, json.dumps(note).encode()),
                    *(CommitOperationDelete(name) for name in stale if name not in names),
                ],
                commit_message=checkpoint.path.name if checkpoint.step == NO_STEP else f"Step {checkpoint.step}",
                parent_commit=there.sha,
            )

    def share(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts, place: str) -> None:
        pass  # one process commits

    def mend(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts) -> None:
        pass

    def remove(self, checkpoint: Checkpoint) -> None:
        pass

    def tidy(self) -> None:
        pass

    def _note(self) -> dict[str, Any] | None:
        """What the repository says of its weights; None if it says nothing."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self._repository, NOTE, endpoint=self._api.endpoint)
        data = b""
        with self._errors():
            headers = build_hf_headers(token=self._api.token)
            with self._session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                status = answer.status_code
                for part in answer.iter_bytes(_MAX_NOTE_BYTES):
                    data += part
                    if len(data) > _MAX_NOTE_BYTES:
                        break
        if status == 404:
            return None
        self._check(status)
        try:
            told: dict[str, Any] = json.loads(data)
            told["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError("not a file of lazyckpt", path=f"{self._place}/{NOTE}") from error
        return told

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises OSError for what may pass, and MirrorError for what does not. Neither quotes a request."""
        try:
            yield
            return
        except Exception as error:
            status, told = _status(error), f"the request failed ({type(error).__name__})"
            if type(error).__name__ == "OfflineModeIsEnabled":
                told = "HF_HUB_OFFLINE is set, so nothing goes to the Hub"
            if isinstance(error, RuntimeError) and "shutdown" in str(error):  # of concurrent.futures
                told = "Python is ending, and huggingface_hub starts no more threads: close() the Checkpointer before"
        self._check(status)
        raise OSError(errno.EIO, told, self._place)

    def _check(self, status: int) -> None:
        """Raises the error that the status of an answer means."""
        if status == 401:
            what = "the token is missing, wrong or expired (401): set HF_TOKEN, or log in with `hf auth login`"
            raise MirrorError(what, mirror=self._place)
        if status == 403:
            raise MirrorError(f"the token has no right to write to {self._repository} (403)", mirror=self._place)
        if status == 404:
            raise MirrorError("there is no such repository, or the token has no right to it (404)", mirror=self._place)
        if status >= 400:
            raise OSError(errno.EIO, f"the request failed (status {status})", self._place)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of huggingface_hub in the output of training, unless the user has decided about them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _status(error: BaseException) -> int:
    """The status of the answer that an error is about; 0 if there was none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(found := getattr(getattr(seen, "response", None), "status_code", None), int):
            return found
        seen = seen.__cause__
    return 0
