"""scripts/long_files.py finds a file over 350 lines, unless it begins with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("long_files", Path(__file__).parent.parent / "scripts/long_files.py")
assert _spec is not None and _spec.loader is not None
long_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(long_files)


def write(folder: Path, name: str, opening: str, lines: int) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(opening + "\n" * (lines - opening.count("\n")))


@pytest.mark.parametrize("name", ["lazyckpt/room/a.py", "integrations/a.py", "csrc/room/a.cc", "csrc/a.h"])
def test_it_fails_and_names_the_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, name, "\n", 350)
    assert long_files.main(tmp_path) == 0
    write(tmp_path, name, "\n", 351)
    capsys.readouterr()
    assert long_files.main(tmp_path) == 1
    said = f"{name} has 351 lines; split it, or say in its docstring why it is one file\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("lazyckpt/a.py", '"""Reads.\n\nOne file because it is one state machine.\n"""\n'),
        ("lazyckpt/a.py", '"""Reads. One file\nbecause it is one state machine."""\n'),
        ("csrc/a.cc", "// Reads. One file\n// because it is one state machine.\n"),
    ],
)
def test_a_reason_at_the_beginning_is_enough(name: str, opening: str, tmp_path: Path) -> None:
    write(tmp_path, name, opening, 351)
    assert long_files.main(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("lazyckpt/a.py", '"""Reads. One file because"""\n'),
        ("lazyckpt/a.py", '"""Reads."""\n\n# One file because it is one state machine.\n'),
        ("csrc/a.cc", "// Reads.\n\nint a;  // One file because it is one state machine.\n"),
    ],
)
def test_no_reason_and_one_elsewhere_are_not(name: str, opening: str, tmp_path: Path) -> None:
    write(tmp_path, name, opening, 351)
    assert long_files.main(tmp_path) == 1


def test_of_the_tree_itself() -> None:
    assert long_files.main(Path(__file__).parent.parent) == 0
