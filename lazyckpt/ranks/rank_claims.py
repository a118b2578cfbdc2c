"""The claims of ranks on a folder, in the store of torch.distributed: which ranks save into it, and how.

A rank that saves whole checkpoints by itself must be the only one there: others would replace its checkpoints. And none
may do so where ranks save shards together. The first rank of each kind claims the folder. A rank that finds another
rank's claim refuses, and leaves a note, which the others find before they publish, or while they wait to join. The note
stays, so that all of them find it; a rank that comes later takes it for a note of an earlier attempt.

There is no collective, and a save of one rank sends one short message, on a background thread. Ranks that track and
restore claim nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import NoReturn

from torch import distributed

from lazyckpt import private_names, waits
from lazyckpt.errors import ConfigError
from lazyckpt.ranks.rounds import StoreLost
from lazyckpt.ranks.store import PollingClient
from lazyckpt.storage import mounts
from lazyckpt.warn import warn

_ID_BYTES = 32  # unique, before the text of a note


class RankClaims:
    """The claims of this process on one folder. The thread that saves calls all methods but ``look``. They do nothing
    unless torch.distributed has several ranks; a lost store counts as silence."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keys: str | None = None  # the prefix of the folder's keys
        self._claims: set[str] = set()  # that this rank holds
        self._began = False
        self._known: bytes | None = None  # the note that was there before, or that this rank has found
        self._note: bytes | None = None  # that this rank has left
        self._announced_s = 0.0
        self._pid = os.getpid()

    def enter(self) -> None:
        """Claims the folder for whole checkpoints of this rank. Raises ConfigError if another rank saves there."""
        if "whole" in self._claims or (client := default_store()) is None:
            return
        with contextlib.suppress(StoreLost, OSError):
            mine = distributed.get_rank()
            self._begin(client)
            if (holder := int(client.claim(self._key("whole"), b"%d" % mine))) != mine:
                self._refuse(client, _both_whole(self._directory, holder, mine))
            if (sharded := client.look(self._key("sharded"))) is not None and int(sharded) != mine:
                client.delete(self._key("whole"))
                self._refuse(client, _whole_and_sharded(self._directory, mine, int(sharded)))
            self._claims.add("whole")
            self._take_back_note(client)

    def announce(self) -> None:
        """Claims the folder for shards that all ranks save together."""
        self._announced_s = time.monotonic()
        if (client := default_store()) is not None:
            self._give_up("whole")
            with contextlib.suppress(StoreLost, OSError):
                self._take_back_note(client)
                self._begin(client)
                if int(client.claim(self._key("sharded"), b"%d" % distributed.get_rank())) == distributed.get_rank():
                    self._claims.add("sharded")

    def look(self) -> None:
        """Raises ConfigError if another rank was refused because this one saves whole checkpoints. Raises once for each
        note: this rank goes on when the other one stops. Any thread."""
        if "whole" in self._claims and (client := default_store()) is not None:
            with contextlib.suppress(StoreLost, OSError):
                self._raise_note(client)

    def await_all(self) -> None:
        """Called now and then while this rank waits for all ranks to join. Raises ConfigError if one will not join."""
        if (client := default_store()) is None:
            return
        with contextlib.suppress(StoreLost, OSError):
            self._raise_note(client)
            holder = client.look(self._key("whole"))
            if holder is not None and time.monotonic() > self._announced_s + waits.ALONE_GRACE_S:
                self._refuse(client, _whole_and_sharded(self._directory, int(holder), distributed.get_rank()))

    def leave(self) -> None:
        """Gives up all claims. Warns if another rank was refused and this one has not reported it."""
        if os.getpid() != self._pid:
            return
        try:
            self.look()
        except ConfigError as error:
            warn(str(error))
        for claim in list(self._claims):
            self._give_up(claim)

    def _give_up(self, claim: str) -> None:
        if claim in self._claims and (client := default_store()) is not None:
            self._claims.discard(claim)
            with contextlib.suppress(StoreLost, OSError):
                client.delete(self._key(claim))

    def _refuse(self, client: PollingClient, why: str) -> NoReturn:
        self._note = uuid.uuid4().hex.encode() + why.encode()
        client.set(self._key("note"), self._note)
        raise ConfigError(why)

    def _begin(self, client: PollingClient) -> None:
        """Notes the present note, which is of an earlier attempt. Call it before a claim, which others may refuse at
        once."""
        if not self._began:
            self._known, self._began = client.look(self._key("note")), True

    def _raise_note(self, client: PollingClient) -> None:
        if (note := client.look(self._key("note"))) not in (None, self._known, self._note):
            self._known = note
            raise ConfigError(note[_ID_BYTES:].decode())

    def _take_back_note(self, client: PollingClient) -> None:
        note, self._note = self._note, None
        if note is not None and client.look(self._key("note")) == note:
            client.delete(self._key("note"))

    def _key(self, name: str) -> str:
        if self._keys is None:
            self._keys = f"lazyckpt/claims/{hashlib.sha256(identity(self._directory).encode()).hexdigest()}"
        return f"{self._keys}/{name}"


def default_store() -> PollingClient | None:
    """The store of the default process group; None unless that has several ranks. It belongs to training, too, so
    nothing waits in it."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    private_names.check("torch.distributed")
    return PollingClient(distributed.distributed_c10d._get_default_store())


def identity(folder: Path) -> str:
    """A text that names one folder, the same in all processes that see it. A folder on a local disk has another text on
    each machine, even under the same path. Two mounts of one network file system under different addresses
    count as two. Raises OSError."""
    kind, source = mounts.source_of(folder)
    found = os.stat(folder)
    if kind in _NETWORK:
        return f"{kind} {source} {found.st_ino}"
    return f"{machine()} {found.st_dev} {found.st_ino}"


_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "fuse.glusterfs")


def machine() -> str:
    """A text that is the same for all processes of this machine until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.uname().nodename


def _both_whole(directory: Path, first: int, second: int) -> str:
    return (
        f"ranks {first} and {second} both save into {directory}, each the whole state by itself, so each would replace "
        "the checkpoints of the other. Let one rank save, as in `if torch.distributed.get_rank() == 0: "
        "ckpt.save(step)`; the others may track and restore. Or let all ranks write one checkpoint together: "
        'Checkpointer(…, writers="auto") on every rank. Or give each rank a folder of its own'
    )


def _whole_and_sharded(directory: Path, whole: int, sharded: int) -> str:
    return (
        f"rank {sharded} tracks DTensors or has writers=…, so it saves into {directory} together with all ranks; rank "
        f"{whole} tracks none, has no writers, and saves there by itself. Shard the model on every rank before "
        f"track(), give every Checkpointer the same writers, or give rank {whole} a folder of its own"
    )
