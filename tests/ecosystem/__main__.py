"""``python -m ecosystem NAME`` trains one row and prints what became of it; without a name it lists the rows.

``WITNESS=versions`` in front of it tries another witness than the default.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from conftest import describe_graph

from ecosystem import table
from ecosystem.parts import without_kernels_of_torchvision
from ecosystem.rows import outcome, quiet, write


def main(name: str, result: Path | None) -> int:
    quiet()
    without_kernels_of_torchvision()
    row = next(row for row in table.rows() if row.name == name)
    if "deepspeed" in row.packages:
        import deepspeed_training  # noqa: F401  # puts DeepSpeed on the path
    with tempfile.TemporaryDirectory() as folder:
        found = outcome(row, Path(folder), describe_graph, os.environ.get("WITNESS", "auto"))
    if result is not None:
        write(found, result)
    print(table.line(found))
    print("\n".join(found.failures))
    return bool(found.failures)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("\n".join(row.name for row in table.rows()))
    else:
        sys.exit(main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None))
