"""scripts/plain_words.py finds each word that makes a sentence hard to read, and only those."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("plain_words", Path(__file__).parent.parent / "scripts/plain_words.py")
assert _spec is not None and _spec.loader is not None
plain_words = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_words)


@pytest.mark.parametrize(
    "text",
    [
        "# Nobody waits here.",
        "# for whoever asks",
        '"""It is done by now."""',
        "chosen such that it fits",
        "That which is saved stays.",
        "What is captured stays. Is it?",
        "// it reads what\n// is left",
        "one that is done by\n    # now",
    ],
)
def test_each_word_is_found(text: str) -> None:
    assert [number for number, _ in plain_words.found_in("lazyckpt/a.py", f"first\n{text}\n")] == [2]


@pytest.mark.parametrize(
    "text",
    ["## What is a checkpoint?", "no body", "such a thing that", "by nowadays", "what island", "if what is not None:"],
)
def test_other_sentences_pass(text: str) -> None:
    assert list(plain_words.found_in("docs/a.md", text)) == []


def test_the_allow_list_is_for_one_file_and_one_text() -> None:
    assert list(plain_words.found_in("tests/storage/test_permissions.py", "os.setuid(NOBODY)")) == []
    assert list(plain_words.found_in("tests/storage/test_permissions.py", "nobody reads it"))
    assert list(plain_words.found_in("tests/storage/test_commit.py", "os.setuid(NOBODY)"))


def test_it_fails_and_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a.md").write_text("One.\nNobody reads this.\n")
    assert plain_words.main(tmp_path) == 1
    assert "a.md:2: Nobody reads this." in capsys.readouterr().out
    (tmp_path / "a.md").write_text("One.\nNo thread reads this.\n")
    assert plain_words.main(tmp_path) == 0
