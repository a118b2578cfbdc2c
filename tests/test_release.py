"""`make release` finds everything that a release lacks. Each test takes one thing away from a whole one."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402

sys.path.pop(0)

MODULES = ("lazyckpt/__init__.py", "lazyckpt/py.typed", "integrations/__init__.py")
METADATA = "Metadata-Version: 2.4\nName: lazyckpt\nVersion: {}\n\n# lazyckpt\n\n[docs](https://example.org/docs)\n"
WHEEL = "lazyckpt-{}-cp311-cp311-{}.whl"
LINUX = "manylinux_2_28_x86_64"


def repository(root: Path, files: dict[str, str]) -> None:
    """Makes a repository of a release that lacks nothing, and its dist."""
    whole = {
        "pyproject.toml": '[project]\nversion = "1.2.0"\n',
        "lazyckpt/_version.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.0] - 2027-01-31\n\n- News.\n\n## [1.1.0] - 2027-01-30\n\n- Old.\n",
        "LICENSE": "terms",
        "licenses/zlib.txt": "terms",
        "scripts/wheel/libraries.sh": "describe zlib 1.2.13 z\n",
        "tests/golden/1.2.0/tensors.pt": "tensors",
        ".gitignore": "dist/\n",
    }
    for name, text in (whole | dict.fromkeys(MODULES, "") | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ("git", "-C", root, "-c", "user.name=us", "-c", "user.email=us@example.org")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "all"), ("tag", "v1.2.0")):
        subprocess.run([*git, *words], check=True)


def distribution(
    root: Path, *, version: str = "1.2.0", platform: str = LINUX, without: str = "", extra: str = ""
) -> None:
    dist = root / "dist"
    dist.mkdir()
    metadata = METADATA.format(version)
    with tarfile.open(dist / f"lazyckpt-{version}.tar.gz", "w:gz") as sdist:
        (root / "PKG-INFO").write_text(metadata)
        sdist.add(root / "PKG-INFO", f"lazyckpt-{version}/PKG-INFO")
        (root / "PKG-INFO").unlink()
    info = f"lazyckpt-{version}.dist-info"
    names = {"lazyckpt/__init__.py", "lazyckpt/py.typed", "lazyckpt/_version.py", "lazyckpt/integrations/__init__.py"}
    names |= {"lazyckpt/_engine.cpython-311-x86_64-linux-gnu.so"}
    names |= {
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/licenses/",
        f"{info}/licenses/licenses/zlib.txt",
        f"{info}/METADATA",
        *extra.split(),
    }
    with zipfile.ZipFile(dist / WHEEL.format(version, platform), "w") as wheel:
        for name in sorted(names):
            if not without or without not in name:
                wheel.writestr(name, metadata if name.endswith("METADATA") else "")


OFFLINE = [release.one_version, release.changelog, release.tag, release.golden_files, release.files, release.contents]
OFFLINE += [release.licenses, release.links]


def findings(root: Path) -> Iterator[str]:
    """What the checks say that need no tools."""
    for check in OFFLINE:
        yield from check(release.Release(root, root / "dist"))


def test_nothing_is_missing(tmp_path: Path) -> None:
    repository(tmp_path, {})
    distribution(tmp_path)
    assert list(findings(tmp_path)) == []


@pytest.mark.parametrize(
    ("files", "archive", "said"),
    [
        ({"pyproject.toml": 'version = "1.1.0"\n'}, {}, "another version than lazyckpt/_version.py, 1.2.0"),
        ({"lazyckpt/_version.py": '__version__ = "1.2.0.dev1"\n'}, {}, "1.2.0.dev1 is not the version of a release"),
        ({}, {"version": "1.1.0"}, "lazyckpt-1.1.0.tar.gz is of version 1.1.0, not 1.2.0"),
        ({"CHANGELOG.md": "## [Unreleased]\n\n- News.\n"}, {}, "[Unreleased] holds changes"),
        ({"CHANGELOG.md": "## [1.1.0] - 2027-01-30\n\n- Old.\n"}, {}, "there is no section '## [1.2.0]"),
        ({"CHANGELOG.md": "## [1.2.0]\n\n- News.\n"}, {}, "lacks its date"),
        ({"tests/golden/1.2.0/tensors.pt": "", "lazyckpt/_version.py": '__version__ = "1.3.0"\n'}, {}, "golden/1.3.0"),
        ({}, {"platform": "linux_x86_64"}, "is for linux_x86_64, not for manylinux_2_28"),
        ({}, {"without": "_engine"}, "holds 0 engines"),
        ({}, {"without": "py.typed"}, "differ in lazyckpt/py.typed"),
        ({}, {"extra": "lazyckpt/test_it.py"}, "differ in lazyckpt/test_it.py"),
        (
            {"scripts/wheel/libraries.sh": "describe zlib 1 z\ndescribe other 1 o\n"},
            {},
            "licenses/other.txt is missing",
        ),
        ({}, {"without": "zlib.txt"}, "differs in zlib.txt"),
    ],
)
def test_what_is_missing_is_found(files: dict[str, str], archive: dict[str, str], said: str, tmp_path: Path) -> None:
    repository(tmp_path, files)
    distribution(tmp_path, **archive)
    assert [finding for finding in findings(tmp_path) if said in finding]


def test_the_commit_is_the_tagged_one(tmp_path: Path) -> None:
    repository(tmp_path, {})
    distribution(tmp_path)
    (tmp_path / "LICENSE").write_text("other terms")
    assert list(findings(tmp_path)) == ["not committed: LICENSE"]
    subprocess.run(["git", "-C", tmp_path, "tag", "--delete", "v1.2.0"], check=True, capture_output=True)
    assert "no tag v1.2.0 on this commit: git tag -a v1.2.0" in findings(tmp_path)


def test_links_into_the_repository_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, {})
    monkeypatch.setattr(sys.modules[__name__], "METADATA", METADATA + "[more](docs/more.md) [here](#it)\n")
    distribution(tmp_path)
    (said,) = findings(tmp_path)
    assert "1 lead into the repository, such as docs/more.md" in said


def test_every_check_is_listed() -> None:
    """And each says in one line what must hold."""
    text = (ROOT / "scripts" / "release.py").read_text()
    defined = re.findall(r"^def (\w+)\(release: Release\) -> Findings:", text, re.MULTILINE)
    assert [check.__name__ for check in release.CHECKS] == defined
    assert {*release.CHECKS} - {*OFFLINE} == {release.rendering, release.hosted}


def test_the_workflow_is_marked_as_not_run() -> None:
    for workflow in (ROOT / ".github" / "workflows").iterdir():
        text = workflow.read_text()
        assert "has not been run" in text
        assert all(re.search(r"@[0-9a-f]{40} # v", line) for line in text.splitlines() if "uses:" in line)
