"""The engine on the machine of the day: built from the carried sources, or kept from the call before."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu.stages import CARRIED, ROOT, Day

FETCHED = ROOT / ".carried"
KEPT = FETCHED / "engine.tgz"  # what an earlier call sent back
STAMP = ROOT / "build" / "engine.sha"
# What the first process of a machine reads off its disk.
WARM = "import torch; torch.cuda.is_available() and torch.ones(8, device='cuda').sum().item()"


def prepare(day: Day) -> None:
    """Leaves an engine of these sources in place, and sends it back as engine.tgz. Raises RuntimeError if there is
    none."""
    if day.is_rehearsal:
        return  # it has an engine
    # A container's may have 64 MB.
    subprocess.run(["mount", "-o", "remount,size=70g", str(day.tmpfs)], check=False, capture_output=True)
    if KEPT.exists():
        shutil.unpack_archive(KEPT, ROOT, "gztar")
    warm = f'{sys.executable} -c "{WARM}"'
    if has_engine():
        day.stage("warm", 90, ["sh", "-c", warm])
    else:
        build = f"{warm} & PYTHON={sys.executable} sh scripts/offline.sh build {FETCHED}; built=$?; wait; exit $built"
        text = day.stage("build", 150, ["sh", "-c", build])
        if "-- build: done" not in "\n".join(day.lines) or not engines():
            raise RuntimeError(f"no engine was built: {text[-3000:]}")
        STAMP.write_text(digest_of_sources())
    pack(day.out / "engine.tgz")


def has_engine() -> bool:
    """Whether an engine of these sources is in place."""
    return bool(engines()) and STAMP.exists() and STAMP.read_text() == digest_of_sources()


def engines() -> list[Path]:
    return sorted((ROOT / "lazyckpt").glob("_engine*.so"))


def digest_of_sources() -> str:
    """Of what the engine is built from, for this Python."""
    digest = hashlib.sha256(sys.version.encode())
    for source in sorted((ROOT / "csrc").rglob("*.*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def pack(archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as packed:
        for path in (STAMP, CARRIED / "python", ROOT / "lazyckpt" / "integrations", *engines()):
            if path.exists():
                packed.add(path, path.relative_to(ROOT))
