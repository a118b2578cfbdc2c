"""``make fuzz``: atheris looks for files that reach new code in the parsers, from the seeds of mutate.py.

``python -m attacks.explore FOLDER [libFuzzer's options]``. It stops at a file that is read wrongly and leaves it in
FOLDER as ``crash-…``. Add an attack that does the same.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path

import atheris
import torch

torch.set_num_threads(1)  # imported before the instrumented modules: torch itself would take minutes

with atheris.instrument_imports(include=["lazyckpt"]):
    from attacks.judge import judge
    from attacks.mutate import mutate, seeds
    from lazyckpt.conversion import inert  # noqa: F401
    from lazyckpt.formats import pickle_guard, plain_pickle, safetensors, torch_zip_reader  # noqa: F401
    from lazyckpt.reading import bounded_pickle  # noqa: F401
    from lazyckpt.tools import tree  # noqa: F401


def _mutated(data: bytes, max_size: int, seed: int) -> bytes:
    if seed % 4 == 0 or len(data) < 20:
        return bytes(atheris.Mutate(data, max_size))
    return mutate(data, random.Random(seed))[:max_size]


def main(folder: Path, options: list[str]) -> None:
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for name, content in seeds().items():
        (corpus / name).write_bytes(content)
    path = folder / "input.pt"

    warnings.simplefilter("ignore")  # of zipfile, that a name is there twice

    def one(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        judge(path)

    fixed = [f"-artifact_prefix={folder}{os.sep}", "-max_len=20000", "-rss_limit_mb=4096", "-timeout=30"]
    atheris.Setup([sys.argv[0], str(corpus), *fixed, *options], one, custom_mutator=_mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
