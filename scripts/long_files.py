"""Finds source files that are too long to read in one go. `make check` runs it.

    python scripts/long_files.py [FOLDER]

A file of one subject may be longer if the comment or docstring at its beginning says why: "One file because …".
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

MOST_LINES = 350
REASON = re.compile(r"\bOne file because\s+\w")
PLACES = ("lazyckpt/**/*.py", "integrations/**/*.py", "csrc/**/*.cc", "csrc/**/*.h")


def opening_of(path: Path, text: str) -> str:
    """Returns the docstring of a module, or the comment at the beginning of a C++ file, as one line."""
    if path.suffix == ".py":
        return " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    comment = re.match(r"(\s*//[^\n]*\n)*", text)
    return " ".join(comment[0].replace("//", " ").split()) if comment else ""


def main(folder: Path) -> int:
    findings = []
    for path in sorted(path for place in PLACES for path in folder.glob(place)):
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > MOST_LINES and not REASON.search(opening_of(path, text)):
            name = path.relative_to(folder)
            findings.append(f"{name} has {lines} lines; split it, or say in its docstring why it is one file")
    print("\n".join(findings or ["files: short, or with a reason"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
