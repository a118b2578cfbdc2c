"""A process that saves, for a trial to kill, cut off, or record: ``python actor.py`` forks a child for each line.

A line is a :class:`Task` as JSON. The parent answers with the child's process id and, when the child has ended, its
exit code. It imports torch once, since that takes longer than most trials, and computes nothing itself.

``log`` is the oracle. The child writes each line at once, so that it survives:

    saving NAME VALUE     and later   durable NAME VALUE
    letting NAME          from here on retention may remove it
    armed                 the trial begins

With ``record`` the log holds every operation on the file system, too; the engine's fault backend writes its own:

    begin NUMBER OPERATION PATH …     and later   end NUMBER OPERATION PATH …
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it, a second for each child

import lazyckpt
from lazyckpt import _engine
from lazyckpt.storage import commit, folders, mounts, removal

WORDS = 2500  # of a tensor; with three, a checkpoint takes 60 kB
FEW_WORDS = 40  # and a few kB: few enough blocks that each subset of them can be looked at
KNOBS: dict[str, Any] = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "io_depth": 2, "copy_threads": 1}


def state(value: int, words: int = WORDS) -> dict[str, torch.Tensor]:
    """A state in which :func:`value_of` notices any piece of another one."""
    return {name: torch.arange(words) * 1000 + value for name in "abc"}


def value_of(tree: dict[str, Any]) -> int:
    value, words = int(tree["a"][0]), len(tree["a"])
    assert words in (WORDS, FEW_WORDS), "a piece of a tensor"
    expected = state(value, words)
    assert tree.keys() >= expected.keys(), "tensors are missing"
    assert all(torch.equal(tree[name], tensor) for name, tensor in expected.items()), "a mixed state"
    return value


@dataclasses.dataclass
class Task:
    root: str
    log: str
    scenario: str
    value: int = 1  # of the first save; counted up
    seed: int = 0
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""  # of the engine
    record: bool = False
    kill_at: int = 0  # this call of FUNCTIONS once armed, after up to 2 ms; counted from 1
    drop: str = ""  # an operation of role() that is not done: a mutant
    mutant: str = ""  # one of MUTANTS
    words: int = WORDS  # of a tensor


def role(path: str) -> str:
    return re.sub(r"-[0-9a-f]{32}", "", os.path.basename(path))


BY_DESCRIPTOR = ("fsync", "fdatasync", "pwrite")


class Calls:
    """Counts, records, drops or ends at the calls of Python that change the file system under a folder."""

    FUNCTIONS = ("mkdir", "rmdir", "unlink", "rename", "replace", "link", "open", *BY_DESCRIPTOR)

    def __init__(self, task: Task, note: Callable[..., None]) -> None:
        self.task, self.note = task, note
        self.armed = False
        self.count = 0
        self.numbers = 0
        self.lock = threading.Lock()
        self.chance = random.Random(task.seed)
        self.removed = Path(task.log).parent / "removed"
        for name in self.FUNCTIONS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))
        _engine.rename_exchange = self.wrapped("exchange", _engine.rename_exchange)

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return function(*args, **kwargs)
            paths = self.paths(name, args, kwargs)
            if not all((p + "/").startswith(self.task.root + "/") for p in paths):
                return function(*args, **kwargs)
            with self.lock:
                self.numbers += 1
                number = self.numbers
                self.count += self.armed
                last = self.armed and self.count == self.task.kill_at
            operation = {"open": "create", "replace": "rename"}.get(name, name)
            if self.task.drop == f"{operation} {role(paths[-1])}" and self.armed:
                return None
            if last:
                time.sleep(self.chance.choice((0, 0.002)) * self.chance.random())
                os.kill(os.getpid(), signal.SIGKILL)
            if not self.task.record:
                return function(*args, **kwargs)
            words = [f"py{number}", operation, *paths]
            if name == "fsync":
                words.append(str(os.fstat(args[0]).st_size))
            if name in ("unlink", "rename", "replace") and os.path.isfile(paths[-1]):  # its bytes are wanted later
                words.append(str(self.removed / str(number)))
                self.removed.mkdir(exist_ok=True)
                os.link.__wrapped__(paths[-1], words[-1])  # type: ignore[attr-defined]
            self.note("begin", *words)
            try:
                result = function(*args, **kwargs)
            except OSError:
                self.note("failed", *words)
                raise
            self.note("end", *words)
            return result

        return call

    def paths(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        if name in BY_DESCRIPTOR:
            return [os.readlink(f"/proc/self/fd/{args[0]}")]
        folder = kwargs.get("dir_fd")
        before = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        return [os.path.join(before, os.fspath(p)) for p in args[: 2 if name in TWO_PATHS else 1]]


TWO_PATHS = ("rename", "replace", "link", "exchange")


class Actor:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.root = Path(task.root)
        self.log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.value = task.value
        self.tree: dict[str, torch.Tensor] = {}
        fault = [task.fault] if task.fault else []
        if task.record:
            fault.append(f"trace:{task.log}")
        _engine.Engine = functools.partial(_engine.Engine, fault=",".join(fault))  # type: ignore[assignment,misc]
        self.calls = Calls(task, self.note)
        if task.mutant:
            MUTANTS[task.mutant](self)

    def note(self, *words: object) -> None:
        os.write(self.log, (" ".join(map(str, words)) + "\n").encode())

    def arm(self) -> None:
        self.note("armed")
        self.calls.armed = True

    def next_state(self) -> dict[str, torch.Tensor]:
        self.tree.update(state(self.value, self.task.words))
        self.value += 1
        return self.tree

    @contextmanager
    def checkpointer(self, **knobs: Any) -> Iterator[lazyckpt.Checkpointer]:
        with lazyckpt.Checkpointer(self.root / "run", **{**KNOBS, **knobs, **self.task.knobs}) as checkpointer:
            checkpointer.track(x=self.tree)
            yield checkpointer

    @contextmanager
    def saving(self, name: str) -> Iterator[Callable[[Any], None]]:
        """Returns a callback for when the save is durable."""
        value = self.value
        self.note("saving", name, value)

        def durable(future: Any = None) -> None:
            if future is None or future.exception() is None:
                self.note("durable", name, value)

        self.next_state()
        yield durable

    def save(self, checkpointer: lazyckpt.Checkpointer, step: int, wait: bool = True) -> None:
        with self.saving(f"run/step-{step:08d}") as durable:
            handle = checkpointer.save(step)
            handle.add_done_callback(durable)
        if wait:
            handle.result()
            checkpointer._saver.drain()

    def mirror(self, step: int) -> None:
        """Uploads the newest checkpoint, that of ``step``, to a mirror."""
        name, value = f"mirror/step-{step:08d}", self.value - 1
        self.note("saving", name, value)
        with self.checkpointer(mirrors=[lazyckpt.Mirror(self.root / "mirror", keep_last=1)]) as checkpointer:
            while checkpointer.mirror_lag_s:
                time.sleep(0.001)
            self.note("durable", name, value)

    def save_file(self, name: str) -> None:
        with self.saving(name) as durable:
            lazyckpt.save(self.tree, self.root / name)
            durable()


def first(actor: Actor) -> None:
    actor.arm()
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)


def second(actor: Actor) -> None:
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
        actor.arm()
        actor.save(checkpointer, 2)


def again(actor: Actor) -> None:
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
        actor.save(checkpointer, 2)
        actor.arm()
        actor.save(checkpointer, 2)


def retention(actor: Actor) -> None:
    with actor.checkpointer(keep_last=2) as checkpointer:
        actor.save(checkpointer, 1)
        actor.save(checkpointer, 2)
        actor.arm()
        actor.note("letting", "run/step-00000001")
        actor.save(checkpointer, 3)


def reopened(actor: Actor) -> None:
    """A process dies after an exchange that it has not synced; the next process sweeps."""

    def die(staging: commit.Staging) -> None:
        staging._exchange()
        staging._published = True
        raise OSError(errno.EIO, "the process dies here")

    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
        actor.arm()
        publish, commit.Staging.publish = commit.Staging.publish, die  # type: ignore[method-assign,assignment]
        with suppress(lazyckpt.SaveError):
            actor.save(checkpointer, 1)
        commit.Staging.publish = publish  # type: ignore[method-assign]
    with actor.checkpointer():
        pass


def mirrored(actor: Actor) -> None:
    """A mirror in a folder gets a checkpoint."""
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
    actor.arm()
    actor.mirror(1)


def mirrored_again(actor: Actor) -> None:
    """A mirror gets a step that was saved again."""
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
    actor.mirror(1)
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
    actor.arm()
    actor.mirror(1)


def mirrored_retention(actor: Actor) -> None:
    """A mirror that keeps one gets another checkpoint."""
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 1)
    actor.mirror(1)
    with actor.checkpointer() as checkpointer:
        actor.save(checkpointer, 2)
    actor.arm()
    actor.note("letting", "mirror/step-00000001")
    actor.mirror(2)


def lone(actor: Actor) -> None:
    actor.arm()
    actor.save_file("lone.pt")


def lone_over(actor: Actor) -> None:
    actor.save_file("lone.pt")
    actor.arm()
    actor.save_file("lone.pt")


def saver_file(actor: Actor) -> None:
    with lazyckpt.Saver(**{**KNOBS, **actor.task.knobs}) as saver:

        def save() -> None:
            with actor.saving("lone.pt") as durable:
                saver.save(actor.tree, actor.root / "lone.pt").result()
                saver.wait()
                durable()

        save()
        actor.arm()
        save()


def staged(actor: Actor) -> None:
    """A folder with files of others, which stay."""
    with lazyckpt.Saver(**{**KNOBS, **actor.task.knobs}) as saver:

        def save() -> None:
            with actor.saving("staged") as durable:
                folder = saver.stage(actor.root / "staged")
                folder.add("state.pt", actor.tree)
                folder.save().result()
                saver.wait()
                durable()

        save()
        (actor.root / "staged" / "theirs").touch()
        folders.sync_path(actor.root / "staged")
        actor.note("theirs", "staged")
        actor.arm()
        save()


def filled(actor: Actor) -> None:
    """A folder that cannot be renamed, with files of others, which stay; and two of ours."""
    folder = actor.root / "filled"
    folder.mkdir()
    (folder / "theirs").touch()
    for path in (folder, actor.root):
        folders.sync_path(path)
    mounts.is_fixed = lambda folder: True
    with lazyckpt.Saver(**{**KNOBS, **actor.task.knobs}) as saver:

        def save() -> None:
            value = actor.value
            with actor.saving("filled") as durable:
                staged = saver.stage(folder)
                staged.add("state.pt", actor.tree)
                with open(staged.path / "value", "x", opener=lambda name, flags: os.open(name, flags, 0o666)) as file:
                    file.write(str(value))
                staged.save().result()
                saver.wait()
                durable()

        save()
        actor.note("theirs", "filled")
        actor.arm()
        save()
        save()


def endless(actor: Actor) -> None:
    """Continues a run that was cut off."""
    chance = random.Random(actor.task.seed)
    with actor.checkpointer(keep_last=2) as checkpointer:
        actor.tree.update(state(0, actor.task.words))
        step = checkpointer.restore() or 0
        actor.note("resumed", step)
        while True:
            kind = chance.choices(("next", "again", "lone"), (6, 2, 2))[0]
            if kind == "lone":
                actor.save_file("lone.pt")
                continue
            if kind == "next" or step == 0:
                step += 1
            for old in range(max(0, step - 8), step - 1):  # also when a step is replaced: the cut may have come first
                actor.note("letting", f"run/step-{old:08d}")
            actor.save(checkpointer, step, wait=chance.random() < 0.5)


def one_and_wait(actor: Actor) -> None:
    """Waits, since a checkpoint that was acknowledged too early may still reach the disk a little later."""
    with actor.checkpointer() as checkpointer:
        actor.arm()
        actor.save(checkpointer, 1)
        time.sleep(60)


SCENARIOS = {
    f.__name__: f
    for f in (
        first,
        second,
        again,
        retention,
        reopened,
        mirrored,
        mirrored_again,
        mirrored_retention,
        lone,
        lone_over,
        saver_file,
        staged,
        filled,
        endless,
        one_and_wait,
    )
}


# what the trials must find


def in_place(actor: Actor) -> None:
    """Writes into the folder that has the final name."""
    folders.fresh_name = lambda prefix, target: target

    def publish(self: commit.Staging) -> None:
        folders.sync_path(self.target.parent)
        self._published = True
        self._unlock()

    commit.Staging.publish = publish  # type: ignore[method-assign,assignment]


def rename_first(actor: Actor) -> None:
    """Writes the manifest after the folder has its name."""
    describe = commit.Staging.describe
    publish = commit.Staging.publish

    def both(self: commit.Staging) -> None:
        replaced = publish(self)
        self.path = self.target
        describe(self, *self.arguments)  # type: ignore[attr-defined]
        folders.sync_path(self.target.parent)
        return replaced  # type: ignore[return-value]

    commit.Staging.describe = lambda self, *args: setattr(self, "arguments", args)  # type: ignore[method-assign]
    commit.Staging.publish = both  # type: ignore[method-assign]


def acknowledge_early(actor: Actor) -> None:
    """Resolves the handle before publishing."""
    publish = commit.Staging.publish

    def after(self: commit.Staging) -> None:
        name = str(self.target.relative_to(actor.root))
        actor.note("durable", name, actor.value - 1)
        publish(self)

    commit.Staging.publish = after  # type: ignore[method-assign,assignment]


def sync_early(actor: Actor) -> None:
    """Syncs the manifest before handing its bytes to the kernel."""
    write = commit.json.dump

    def dump(manifest: Any, file: Any, **options: Any) -> None:
        os.fsync(file.fileno())
        write(manifest, file, **options)
        file.flush()
        actor.task.drop = "fsync manifest.json"

    commit.json.dump = dump  # type: ignore[assignment]


def retain_early(actor: Actor) -> None:
    """Removes old checkpoints before the new one has its name."""
    publish = commit.Staging.publish

    def late(self: commit.Staging) -> Path | None:
        if actor.calls.armed:
            removal.remove(self.target.with_name("step-00000002"))
        return publish(self)

    commit.Staging.publish = late  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[Actor], None]] = {
    f.__name__: f for f in (in_place, rename_first, acknowledge_early, sync_early, retain_early)
}


# the server, and the tests' end of it


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def start(self, task: Task) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(dataclasses.asdict(task)) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """Runs a task and returns the exit code of its child."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def run(self, task: Task) -> int:
        self.start(task)
        return self.wait()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # the pool of threads did not survive the fork
                actor = Actor(Task(**json.loads(line)))
                SCENARIOS[actor.task.scenario](actor)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
