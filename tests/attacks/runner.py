"""Gives hostile files to everything that reads, and reports what went wrong.

``python -m attacks.runner FOLDER [NAME...]`` makes each attack in a folder below FOLDER, in a child of its own with
limits on memory and time. It prints a JSON line for each attack: its name and its violations.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import shutil
import signal
import sys
import traceback
import unicodedata
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import typer.testing
from conftest import describe_graph, torch_load_with_our_globals
from typer.testing import CliRunner

import lazyckpt
from attacks import ATTACKS, CANARY, Attack, victim
from attacks.sharded import folder_of, published
from lazyckpt.cli import app
from lazyckpt.errors import LazyCkptError
from lazyckpt.storage.manifest import checksum
from memory import reset_peak, status_bytes

SECRET = "the secret outside"
# typer's runner would make all commands anew for each call, which takes longer than most attacks.
typer.testing._get_command = functools.cache(typer.testing._get_command)
_TIME_LIMIT_S = 30
_ADDRESSES_BYTES = 4 << 30  # address space that a child may reserve beyond torch's
# Memory that any file may cost: the engine's rings, modules of torch, and pages of libtorch. For the text of its first
# error in C++, torch looks up symbols, and touches 90 MiB of them.
_FREE_BYTES = 160 << 20
_BYTES_PER_BYTE = 50  # memory per byte of the file: a parsed JSON header takes about thirty times its text


class Witness:
    """Collects violations: a wrong error, memory, output."""

    def __init__(self, target: Path, large: bool) -> None:
        self.violations: list[str] = []
        self.refused: dict[str, str] = {}  # reader -> the error that it raised
        self._large = large  # it may ask for more memory than there is
        self._allowed = _FREE_BYTES + _BYTES_PER_BYTE * _bytes_on_disk(target)
        self._before = reset_peak()

    def blame(self, what: str) -> None:
        self.violations.append(what)

    @contextmanager
    def watch(self, who: str) -> Iterator[None]:
        """Only an error of lazyckpt's own may come out, and memory must stay within what the file's size allows."""
        print("at", who, file=sys.stderr, flush=True)  # the last words of a child that dies
        gc.collect()  # what the reader before left in cycles
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except LazyCkptError as error:
            self.refused[who] = type(error).__name__
            all_of_it = isinstance(error.__cause__, MemoryError) or "can't allocate memory" in str(error.__cause__)
            if all_of_it and not self._large:
                self.blame(f"{who}: asked for all memory: {error}")
            if len(str(error)) > 20_000 + self._allowed // _BYTES_PER_BYTE:
                self.blame(f"{who}: a message of {len(str(error)):,} characters")
            if SECRET in str(error):
                self.blame(f"{who}: reveals a file outside: {error}")
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.blame(f"{who}: {type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})")
        grown = status_bytes("VmHWM") - self._before
        if grown > self._allowed:
            self._before += grown  # reported once
            self.blame(f"{who}: took {grown >> 20} MiB, {self._allowed >> 20} are allowed")


def assault(path: Path, large: bool = False) -> Witness:
    """Gives ``path`` to everything that reads."""
    witness = Witness(path, large)
    if path.is_dir():
        _assault_folder(witness, path)
    else:
        _assault_file(witness, path)
    return witness


def _assault_file(witness: Witness, path: Path) -> None:
    for location in (None, "meta"):
        with witness.watch(f"load({location})"):
            loaded = lazyckpt.load(path, location)
            if location is None:
                compare(witness, path, loaded)
            del loaded
    for command in (["inspect"], ["inspect", "--json"]):
        _command(witness, *command, path)
    if os.stat(path).st_size < 1 << 30:  # to read a hole of a terabyte takes too long
        _command(witness, "verify", path)
        run = _planted(path)
        _restore(witness, run)
        _command(witness, "verify", run)


def _assault_folder(witness: Witness, run: Path) -> None:
    for command in (["ls"], ["ls", "--json"], ["inspect"], ["verify"]):
        _command(witness, *command, run)
    for step in sorted([*run.glob("step-*"), *run.glob("plain")]):
        for location in (None, "meta"):
            with witness.watch("load(folder)"):
                lazyckpt.load(step, location)
        for command in (["verify"], ["inspect"], ["inspect", "--stats", "--json"]):
            _command(witness, *command, step)
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "random_states_0.pkl"):
        if os.path.lexists(run / name):
            with witness.watch(f"load({name})"):
                lazyckpt.load(run / name)
    _restore(witness, run)


def compare(witness: Witness, path: Path, found: Any) -> None:
    """Blames a reader that accepted something else than the format's own library reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = (
                safetensors.torch.load_file(path)
                if path.suffix == ".safetensors"
                else torch_load_with_our_globals(path)
            )
    except Exception as error:
        witness.blame(f"accepted what its own library refuses: {type(error).__name__}: {str(error)[:200]}")
        return
    if path.suffix == ".safetensors":
        found, theirs = ({k: v.clone() for k, v in sorted(x.items())} for x in (found, theirs))
    try:
        ours = describe_graph(found)
    except (RecursionError, TypeError):  # too deep, or its methods are not callable
        return
    if ours != describe_graph(theirs):
        witness.blame("read something else than its own library")


def _planted(path: Path) -> Path:
    """Makes a run's folder with the file as the state of a checkpoint."""
    folder = path.parent / "planted" / "step-00000001"
    folder.mkdir(parents=True)
    shutil.copyfile(path, folder / "state.pt")
    data = path.read_bytes()
    files = [{"name": "state.pt", "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}", "writers": [0]}]
    told = {"format": 1, "sequence": 1, "parent": None, "step": 1, "created": "2025-01-31T12:00:00", "files": files}
    (folder / "manifest.json").write_text(json.dumps({**told, "crc32": checksum(told)}))
    return folder.parent


def _restore(witness: Witness, run: Path) -> None:
    with witness.watch("Checkpointer"), lazyckpt.Checkpointer(run, chunk_bytes=65536, host_buffer_bytes=131072) as ckpt:
        ckpt.track(**victim())
        with witness.watch("restore()"):
            ckpt.restore()
        for folder in [*run.glob("step-*")]:
            with witness.watch("restore(path)"):
                ckpt.restore(path=folder)


def _command(witness: Witness, *arguments: str | Path) -> None:
    who = " ".join(str(a) if isinstance(a, str) else a.name for a in arguments)
    with witness.watch(who):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            raise error
        if result.exit_code not in (0, 1, 2):
            witness.blame(f"{who}: exit code {result.exit_code}")
        for stream in (result.stdout, result.stderr):
            if raw := sorted(controls(stream)):
                witness.blame(f"{who}: raw control characters {raw}")
            if SECRET in stream or "Traceback" in stream:
                witness.blame(f"{who}: {stream[-500:]}")


def controls(text: str) -> set[str]:
    """Characters that a terminal obeys: controls of both kinds, and those that turn text around."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}


def _bytes_on_disk(path: Path) -> int:
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(512 * os.lstat(p).st_blocks for p in paths)


def _snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything outside of the run's folder."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def in_child(work: Callable[[], Any], limit_s: float = _TIME_LIMIT_S) -> Any:
    """Runs ``work`` in a child with limits. Returns its result, or how the child died."""
    read, write = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            signal.alarm(int(limit_s))
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
            limit = status_bytes("VmSize") + _ADDRESSES_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            result = work()
        except BaseException as error:
            traceback.print_exc()
            result = f"the test itself failed: {error!r}"
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "took too long" if number == signal.SIGALRM else f"killed by {signal.Signals(number).name}"
    return json.loads(text) if text else f"exit code {os.WEXITSTATUS(status)}"


def tried(attack: Attack, folder: Path) -> dict[str, Any]:
    """Runs an attack. ``violations`` is empty if it achieved nothing."""
    folder.mkdir(parents=True)

    def work() -> dict[str, Any]:
        path = attack.make(folder)
        away = folder / "outside"
        before = _snapshot(away)
        witness = assault(path, bool(attack.large))
        if not attack.harmless and path.is_file():
            witness.violations += ["accepted"] * ("load(None)" not in witness.refused)
        if _snapshot(away) != before:
            witness.blame("changed a file outside")
        if (folder / CANARY).exists():
            witness.blame("ran code")
        return {"violations": witness.violations, "refused": witness.refused}

    found = in_child(work)
    if isinstance(found, str):
        found = {"violations": [found], "refused": {}}
    if attack.trap and not found["violations"]:
        in_child(lambda: _spring(folder))
        if not (folder / CANARY).exists():
            found["violations"].append("no working trap")
    return found


def _spring(folder: Path) -> None:
    """Runs the gadget, as a careless reader would."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".pt", ".bin"):
            with suppress(BaseException):
                torch.load(path, weights_only=False)


def main(folder: Path, names: list[str]) -> None:
    warm = folder / "warm.pt"
    torch.save({"x": torch.ones(3)}, warm)
    for harmless in (warm, published(folder_of(folder))):  # imports and caches once, and not in each child
        assault(harmless)
    gc.collect()
    gc.freeze()
    for name in names or ATTACKS:
        print(json.dumps({"name": name, **tried(ATTACKS[name], folder / name)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
