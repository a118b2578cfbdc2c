"""A file system in user space that shows another folder, for tests: ``fuse_server.py MOUNT_POINT SHOWN [OPTION]``.

It speaks the protocol of /dev/fuse (linux/fuse.h, 7.31) itself, one request at a time. With ``short`` it writes half of
what it is given, and says so, as write(2) may. With ``rot`` it changes a byte of large writes, and the page cache
keeps what was right. With ``remembers`` the kernel remembers for a second which names were missing, as a client of NFS
does; two mounts of one folder are then like two nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

BIG_WRITES = 1 << 5  # not FUSE_ASYNC_DIO, with which the kernel makes an error of a short answer
PR_SET_PDEATHSIG = 1
KEEP_CACHE = 1 << 1  # of what was opened
MAX_WRITE = 128 << 10
HEADER = struct.Struct("<IIQQIIIHH")
SIZE, MODE = 1 << 3, 1 << 0  # of FUSE_SETATTR


class Server:
    def __init__(self, shown: str, options: tuple[str, ...]) -> None:
        self._paths = {1: shown}
        self._ids = {shown: 1}
        self._short = "short" in options
        self._rot = "rot" in options
        self._missing_s = 1 if "remembers" in options else 0

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, MAX_WRITE + (1 << 16))
            except OSError as error:
                if error.errno == errno.ENODEV:  # it was unmounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET are not answered
                continue
            answer, code = b"", 0
            try:
                method = METHODS.get(opcode)
                if method is None:
                    raise OSError(errno.ENOSYS, "")
                answer = method(self, node, request[HEADER.size :])
            except OSError as error:
                code = -(error.errno or errno.EIO)
            with contextlib.suppress(FileNotFoundError):  # the caller was killed
                os.write(device, struct.pack("<IiQ", 16 + len(answer), code, unique) + answer)

    def _attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        times = (int(s.st_atime), int(s.st_mtime), int(s.st_ctime))
        return struct.pack(
            "<6Q10I", s.st_ino, s.st_size, s.st_blocks, *times, 0, 0, 0, s.st_mode, s.st_nlink, 0, 0, 0, 4096, 0
        )

    def _entry(self, path: str) -> bytes:
        attributes = self._attributes(path)
        node = self._ids.setdefault(path, len(self._paths) + 1)
        self._paths[node] = path
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + attributes

    def _below(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.rstrip(b"\0")))

    def init(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<4I", data)[3] & BIG_WRITES
        return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, flags, 16, 12, MAX_WRITE, 1, 32, 0, *(0,) * 8)

    def lookup(self, node: int, data: bytes) -> bytes:
        path = self._below(node, data)
        if self._missing_s and not os.path.lexists(path):
            return struct.pack("<4Q2I", 0, 0, self._missing_s, 0, 0, 0) + bytes(88)
        return self._entry(path)

    def getattr(self, node: int, data: bytes) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(self._paths[node])

    def setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<2I2Q", data)
        if valid & SIZE:
            os.truncate(self._paths[node], size)
        if valid & MODE:
            os.chmod(self._paths[node], struct.unpack_from("<I", data, 68)[0] & 0o7777)
        return self.getattr(node, b"")

    def mkdir(self, node: int, data: bytes) -> bytes:
        path = self._below(node, data[8:])
        os.mkdir(path)
        return self._entry(path)

    def unlink(self, node: int, data: bytes) -> bytes:
        self._forget(path := self._below(node, data))
        os.unlink(path)
        return b""

    def rmdir(self, node: int, data: bytes) -> bytes:
        self._forget(path := self._below(node, data))
        os.rmdir(path)
        return b""

    def _forget(self, path: str) -> None:
        self._ids.pop(path, None)

    def rename(self, node: int, data: bytes) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", data)[0], data[8:])

    def rename2(self, node: int, data: bytes) -> bytes:
        to, flags = struct.unpack_from("<QI", data)
        if flags:
            raise OSError(errno.EINVAL, "")
        return self._rename(node, to, data[16:])

    def _rename(self, node: int, to: int, data: bytes) -> bytes:
        old, new = (self._below(n, name) for n, name in zip((node, to), data.split(b"\0"), strict=False))
        os.rename(old, new)
        for known, path in list(self._paths.items()):
            if path == old or path.startswith(old + "/"):
                self._ids.pop(path, None)
                self._paths[known] = moved = new + path[len(old) :]
                self._ids[moved] = known
        return b""

    def link(self, node: int, data: bytes) -> bytes:
        path = self._below(node, data[8:])
        os.link(self._paths[struct.unpack_from("<Q", data)[0]], path)
        return self._entry(path)

    def open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & ~os.O_DIRECT  # which asks the kernel, not this server
        return struct.pack("<Q2I", os.open(self._paths[node], flags), KEEP_CACHE * self._rot, 0)

    def create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<2I", data)
        path = self._below(node, data[16:])
        fd = os.open(path, flags & ~os.O_DIRECT, mode & 0o7777)
        return self._entry(path) + struct.pack("<Q2I", fd, KEEP_CACHE * self._rot, 0)

    def read(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(fd, size, offset)

    def write(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", data)
        written = bytearray(data[40 : 40 + size])
        if self._short and size > 4096:
            del written[size // 2 :]
        if self._rot and size > 4096:
            written[100] ^= 1
        return struct.pack("<2I", os.pwrite(fd, written, offset), 0)

    def fsync(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def release(self, node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        answer = b""
        for number, name in enumerate(sorted(os.listdir(self._paths[node]))[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<2Q2I", number, number, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def statfs(self, node: int, data: bytes) -> bytes:
        s = os.statvfs(self._paths[node])
        counts = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<5Q10I", *counts, s.f_bsize, 255, s.f_frsize, *(0,) * 7)

    def nothing(self, node: int, data: bytes) -> bytes:
        return b""


METHODS: dict[int, Callable[[Server, int, bytes], bytes]] = {
    1: Server.lookup,
    3: Server.getattr,
    4: Server.setattr,
    9: Server.mkdir,
    10: Server.unlink,
    11: Server.rmdir,
    12: Server.rename,
    13: Server.link,
    14: Server.open,
    15: Server.read,
    16: Server.write,
    17: Server.statfs,
    18: Server.release,
    20: Server.fsync,
    25: Server.nothing,  # FLUSH
    26: Server.init,
    27: Server.open,  # OPENDIR
    28: Server.readdir,
    29: Server.release,  # RELEASEDIR
    30: Server.fsync,  # FSYNCDIR
    35: Server.create,
    45: Server.rename2,
}


def main(mount_point: str, shown: str, *options: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    how = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MAX_WRITE}"
    arguments = (part.encode() for part in ("lazyckpt-test", mount_point, "fuse.lazyckpt-test"))
    if libc.mount(*arguments, 0, how.encode()) != 0:
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    Server(shown, options).serve(device)


def serve(mount_point: Path, shown: Path, *options: str) -> Callable[[], None]:
    """Mounts it, served by a process of its own. Returns what undoes that."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("FUSE takes root and /dev/fuse")
    mount_point.mkdir()
    server = subprocess.Popen([sys.executable, __file__, mount_point, shown, *options], stderr=subprocess.PIPE)
    while not mount_point.is_mount():
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"no FUSE here: {server.stderr.read().decode().strip()}")
        time.sleep(0.01)

    def stop() -> None:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
        server.kill()
        server.communicate()

    return stop


if __name__ == "__main__":
    main(*sys.argv[1:])
