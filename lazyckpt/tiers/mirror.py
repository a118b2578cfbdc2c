"""``Mirror``: a further place for the checkpoints of a run, and what goes there."""

from __future__ import annotations

import ast
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from lazyckpt.config import hint
from lazyckpt.errors import ConfigError
from lazyckpt.stores.urls import checked, hub_repository, is_url

_PUBLIC_OPTIONS = tuple(f"{prefix}{name}" for prefix in ("", "aws_") for name in ("endpoint", "endpoint_url", "region"))


@dataclass(frozen=True)
class Mirror:
    """A further place for the checkpoints of a run: a bucket, or a folder of another file system.

    Args:
        url: ``s3://bucket/runs/a``, ``gs://…``, ``az://…``, a URL that fsspec opens (``sftp://host/runs/a``), or a
            folder, such as one of a parallel file system. A place belongs to one run.
        what: "all": checkpoints. "model": the weights of the tracked module, and its configuration, as safetensors
            files that ``from_pretrained`` of transformers reads, in folders ``model-00005000``; no run resumes from
            them. Only so may the URL be ``hf://organization/model``, where each publication is a commit.
        model: With ``what="model"``: the name of the tracked module, if there are several.
        every: Only checkpoints whose step is a multiple of this go there. None: all, as far as uploads keep up: while
            one is under way, of those that wait only the newest stays.
        keep_last: Checkpoints to keep there, counted as ``keep_last`` of the Checkpointer. None keeps all.
        keep_every: Also keep checkpoints there whose step is a multiple of this.
        max_bytes_per_s: The most that an upload takes of the network, on the mean; with several ranks, each of them.
            None: no limit.
        options: Settings of an object store, as obstore names them: ``{"endpoint": "https://…", "region": "…"}``; for
            a URL of fsspec, the arguments of its file system. Credentials come from the environment, as the store's own
            tools take them; they may stand here, too.

    It cannot be pickled with options other than the place of the server (``endpoint``, ``region``), since they may hold
    credentials, which a file or a queue would keep; only processes that multiprocessing starts get them.

    Raises ConfigError for an invalid value, and for a URL that holds credentials.
    """

    url: str | os.PathLike[str]
    what: Literal["all", "model"] = "all"
    model: str | None = None
    every: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    max_bytes_per_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike):
            raise ConfigError(f"Mirror: {self.url!r} is neither a URL nor a path")
        if not os.fspath(self.url):
            raise ConfigError('Mirror: "" is neither a URL nor a path')
        text = os.fspath(self.url)
        self._check_what()
        if (repository := hub_repository(text)) is not None:
            self._check_hub()
            place = f"hf://{repository}"
        else:
            place = checked(text) if is_url(text) else str(Path(text).absolute())
        object.__setattr__(
            self, "url", unquote(place.removeprefix("file://")) if place.startswith("file://") else place
        )
        for name in ("every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"Mirror({self.url}): {name}={value!r}: expected a whole number, at least 1")
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError(f"Mirror({self.url}): keep_every adds to keep_last: give keep_last, too")
        rate = self.max_bytes_per_s
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf
        ):
            raise ConfigError(f"Mirror({self.url}): max_bytes_per_s={rate!r}: expected a positive number")

    def _check_what(self) -> None:
        if self.what not in ("all", "model"):
            raise ConfigError(f"Mirror: what={self.what!r}: expected 'all' or 'model'")
        if self.model is not None and (self.what != "model" or not isinstance(self.model, str)):
            raise ConfigError(f"Mirror: model={self.model!r}: the name of a tracked module, for what='model'")

    def _check_hub(self) -> None:
        if self.what != "model":
            raise ConfigError(
                f"Mirror({self.url}): a repository of the Hub is no place to resume from; what='model' publishes the "
                "weights there"
            )
        for name in ("keep_last", "keep_every", "max_bytes_per_s"):
            if getattr(self, name) is not None:
                why = "libraries of the Hub take no limit" if name == "max_bytes_per_s" else "the Hub keeps all commits"
                raise ConfigError(f"Mirror({self.url}): {name} is not for the Hub: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.context import get_spawning_popen

        secret = [name for name in self.options if name.lower() not in _PUBLIC_OPTIONS]
        if secret and get_spawning_popen() is None:
            raise TypeError(
                f"Mirror({self.url}) is not pickled, since options may hold credentials ({', '.join(secret)}); leave "
                "these to the environment, or make the Mirror where it is used"
            )
        return Mirror, tuple(getattr(self, field.name) for field in fields(self))

    def __copy__(self) -> Mirror:
        return self

    def __deepcopy__(self, _: object) -> Mirror:
        return self

    def takes(self, step: int) -> bool:
        """Whether the checkpoint of this step goes there."""
        return self.every is None or step % self.every == 0

    def __str__(self) -> str:
        return str(self.url)


def mirrors_of(given: Iterable[Mirror | str | os.PathLike[str] | Mapping[str, Any]]) -> tuple[Mirror, ...]:
    """The mirrors that a user gives, some as a URL or a path alone, or as a dict of arguments, or as a text that
    ``spelled`` takes. Raises ConfigError."""
    if isinstance(given, str | os.PathLike | Mirror | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"mirrors: expected a list of them, not a {type(given).__name__}")
    mirrors = tuple(map(_mirror_of, given))
    names = [str(mirror) for mirror in mirrors]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"mirrors: {', '.join(sorted(twice))} is there twice")
    return mirrors


def _mirror_of(given: Mirror | str | os.PathLike[str] | Mapping[str, Any]) -> Mirror:
    if isinstance(given, str) and is_url(given) and " " in given:
        (given,) = spelled(given)
    if not isinstance(given, Mapping):
        return given if isinstance(given, Mirror) else Mirror(given)
    names = [field.name for field in fields(Mirror)]
    for name in given:
        if name not in names:
            raise ConfigError(f"mirrors: {name!r} is not an argument of Mirror; {hint(str(name), names)}")
    if "url" not in given:
        raise ConfigError(f"mirrors: {', '.join(given)} without a url")
    return Mirror(**given)


def spelled(text: str) -> list[dict[str, Any]]:
    """The mirrors in the text of an environment variable: "s3://bucket/a every=500 keep_last=5, /lustre/a". Raises
    ConfigError."""
    found: list[dict[str, Any]] = []
    for one in filter(str.strip, text.split(",")):
        try:
            url, *arguments = shlex.split(one)
        except ValueError as error:
            raise ConfigError(f"mirrors: {one.strip()!r}: {error}") from None
        found.append({"url": url})
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if not equals:
                raise ConfigError(f"mirrors: {argument!r}: expected name=value behind the URL, and a comma between two")
            try:
                found[-1][name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                found[-1][name] = value
    return found
