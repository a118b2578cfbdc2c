"""File formats: how a checkpoint is laid out in a standard file, and how one is read back.

Start with ``formats.program``; then one module per format. A layout knows nothing of modules, optimizers or pickles,
and touches no tensor's bytes. ``plain_pickle``, ``pickle_guard`` and ``safe_globals`` parse the pickle of an archive,
and only these need torch.
"""

from __future__ import annotations

import os
from typing import Literal

from lazyckpt.errors import UnsupportedFormatError
from lazyckpt.formats.reader import FileReader

# torch.save before 1.6 begins with the pickle of this number (torch.serialization.MAGIC_NUMBER), as LONG1 of
# 10 bytes, behind the PROTO opcode; from protocol 4 on also behind a FRAME
_LEGACY_MAGIC = b"\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
# The first bytes of other files, their kind, and the library that reads them.
_OTHERS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: git lfs pull fetches it",
    b"\x93NUMPY": "a NumPy array: numpy.load reads it",
    b"GGUF": "a GGUF model: llama.cpp reads it",
    b"\x89HDF\r\n": "an HDF5 file: h5py reads it",
    b"\x80": "a plain pickle, not of torch.save: pickle.load reads it, and runs code from it",
    b"(dp0": "a plain pickle, not of torch.save: pickle.load reads it, and runs code from it",
}
_ZIP_NAME_AT = 30  # in a zip file: the name of its first entry, whose length is at 26

Format = Literal["torch_zip", "safetensors", "torch_legacy"]


def sniff(path: str | os.PathLike[str]) -> Format:
    """Opens ``path`` and tells its format; see ``format_of``. Raises LoadError if it cannot."""
    with FileReader(path) as file:
        return format_of(file)


def format_of(file: FileReader) -> Format:
    """Tells the format of a file from its first bytes, without checking the rest.

    Raises UnsupportedFormatError if it is none of these formats.
    """
    start = file.read(0, min(file.size, 32))
    if start.startswith(b"PK\3\4"):
        name = file.read(_ZIP_NAME_AT, min(int.from_bytes(start[26:28], "little"), file.size - _ZIP_NAME_AT))
        if name.endswith(b".npy"):
            raise UnsupportedFormatError("NumPy arrays (.npz): numpy.load reads them", path=file.path)
        return "torch_zip"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= file.size - 8:
        return "safetensors"
    if start[2:].startswith(_LEGACY_MAGIC) or start[11:].startswith(_LEGACY_MAGIC):
        return "torch_legacy"
    for beginning, what in _OTHERS.items():
        if start.startswith(beginning):
            raise UnsupportedFormatError(what, path=file.path)
    what = f"neither a torch.save archive nor a safetensors file (begins with {start[:16]!r})"
    raise UnsupportedFormatError(what, path=file.path)
