"""Finds words that make a sentence hard to read, in code, comments, messages and pages. `make check` runs it.

    python scripts/plain_words.py [FOLDER]

Say who acts: "no thread waits", not "nobody waits". Name the thing: "damaged files", not "what is damaged".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_GAP = r"[\s#/*\"]+"  # between two words, which may stand on two lines of a comment
WORDS = re.compile(
    rf"\b(nobody|whoever|by{_GAP}now|such{_GAP}that|that{_GAP}which"
    rf"|what{_GAP}is(?! (not )?None)(?![^.:;|]*\?))\b",  # "What is …?" is a question, "what is None" is code
    re.IGNORECASE,
)
FILES = ("*.py", "*.pyi", "*.md", "*.h", "*.cc", "*.sh", "*.toml", "*.yml", "*.yaml", "Makefile", "CMakeLists.txt")

# The start of a path, and a text in which the word may stand.
ALLOWED = (
    ("scripts/plain_words.py", ""),
    ("tests/test_plain_words.py", ""),
    ("tests/storage/test_permissions.py", "NOBODY"),  # the user of that name
    ("tests/cli/test_cli.py", "~nobody"),
)


def found_in(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the words of every finding in the file ``path``, which is relative to the folder."""
    for match in WORDS.finditer(text):
        begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        line = text[begin : end if end >= 0 else None]
        if not any(path.startswith(start) and allowed in line for start, allowed in ALLOWED):
            yield text.count("\n", 0, match.start()) + 1, " ".join(line.split())


def main(folder: Path) -> int:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FILES]
    names = subprocess.run(listed, cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()
    findings = [
        f"{name}:{number}: {line}"
        for name in names
        if (folder / name).is_file()
        for number, line in found_in(name, (folder / name).read_text(errors="replace"))
    ]
    print("\n".join([*findings, f"{len(findings)} sentences to say plainly"] if findings else ["words: plain"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
