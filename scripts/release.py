"""Checks that what lies in dist can be released. `make release` builds it first, and runs this.

    python scripts/release.py [DIST]

It prints every check, looks at all of them even if one fails, and uploads nothing.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PLATFORM = re.compile(r"manylinux_2_28_(x86_64|aarch64)")
PYTHONS = range(10, 15)  # 3.10 to 3.14
RELATIVE_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s]+)")


class Release:
    """What a release of the repository at ``root`` consists of, with the files in ``dist``."""

    def __init__(self, root: Path, dist: Path) -> None:
        self.root = root
        self.sdists = sorted(dist.glob("*.tar.gz"))
        self.wheels = sorted(dist.glob("*.whl"))
        (self.version,) = re.findall(r'__version__ = "(.+)"', self.text("lazyckpt/_version.py"))

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def git(self, *words: str) -> str:
        return subprocess.run(["git", "-C", self.root, *words], capture_output=True, text=True, check=True).stdout

    def metadata(self, archive: Path) -> Message:
        """Returns what an index would show of a file."""
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
                return Parser().parsestr(wheel.read(name).decode())
        with tarfile.open(archive) as sdist:
            member = sdist.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
            assert member is not None
            return Parser().parsestr(member.read().decode())


Findings = Iterator[str]


def run(tool: str, *arguments: object) -> tuple[int, str]:
    """Runs a program of this Python's environment. Returns its status, and what it said as one line."""
    command = [Path(sys.executable).parent / tool, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def one_version(release: Release) -> Findings:
    """the version is the same everywhere"""
    version = Version(release.version)
    if version.is_devrelease or version.local or str(version) != release.version:
        yield f"{release.version} is not the version of a release"
    if f'\nversion = "{release.version}"\n' not in release.text("pyproject.toml"):
        yield f"pyproject.toml has another version than lazyckpt/_version.py, {release.version}"
    for archive in [*release.sdists, *release.wheels]:
        parse = parse_wheel_filename if archive.suffix == ".whl" else parse_sdist_filename
        for found in (str(parse(archive.name)[1]), release.metadata(archive)["Version"]):
            if found != release.version:
                yield f"{archive.name} is of version {found}, not {release.version}"


def changelog(release: Release) -> Findings:
    """CHANGELOG.md has a dated section for it, and nothing unreleased"""
    sections = re.split(r"^## ", release.text("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    bodies = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    if bodies.get("[Unreleased]"):
        yield "the section [Unreleased] holds changes; move them into one for this version"
    titles = [title for title in bodies if title.startswith(f"[{release.version}]")]
    if not titles or not bodies[titles[0]]:
        yield f"there is no section '## [{release.version}] - YYYY-MM-DD', or it is empty"
    elif not re.fullmatch(r"\[.+\] - \d{4}-\d\d-\d\d", titles[0]):
        yield f"'## {titles[0]}' lacks its date, as in '## [{release.version}] - 2027-01-31'"


def tag(release: Release) -> Findings:
    """this commit has its tag, and nothing is uncommitted"""
    wanted = f"v{release.version}"
    if wanted not in release.git("tag", "--points-at", "HEAD").split():
        yield f"no tag {wanted} on this commit: git tag -a {wanted}"
    if changed := release.git("status", "--porcelain"):
        yield f"not committed: {', '.join(line[3:] for line in changed.splitlines())}"


def golden_files(release: Release) -> Findings:
    """later versions will be tested with files that this one wrote"""
    if not (release.root / "tests" / "golden" / release.version).is_dir():
        yield f"tests/golden/{release.version} is missing: python -m golden.make {release.version}, from tests/golden"


def files(release: Release) -> Findings:
    """dist holds an sdist, and wheels for platforms that an index accepts"""
    if len(release.sdists) != 1:
        yield f"one sdist is needed, there are {len(release.sdists)}"
    if not release.wheels:
        yield "there is no wheel"
    for wheel in release.wheels:
        platforms = {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
        if not any(map(PLATFORM.fullmatch, platforms)):
            yield f"{wheel.name} is for {', '.join(platforms)}, not for manylinux_2_28"


def contents(release: Release) -> Findings:
    """wheels hold every module and the engine, and nothing else"""
    tracked = release.git("ls-files", "lazyckpt", "integrations").split()
    modules = {re.sub(r"^integrations/", "lazyckpt/integrations/", name) for name in tracked}
    for wheel in release.wheels:
        with zipfile.ZipFile(wheel) as archive:
            found = {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
        engines = {name for name in found if re.fullmatch(r"lazyckpt/_engine\.\S+\.so", name)}
        if len(engines) != 1:
            yield f"{wheel.name} holds {len(engines)} engines"
        if difference := sorted((found - engines) ^ modules):
            yield f"{wheel.name} and the repository differ in {', '.join(difference)}"


def licenses(release: Release) -> Findings:
    """wheels carry the terms of all that is linked into them"""
    names = {"LICENSE", *(path.name for path in (release.root / "licenses").iterdir())}
    linked = re.findall(r"^describe (\w+)", release.text("scripts/wheel/libraries.sh"), re.MULTILINE)
    for name in sorted({f"{library}.txt" for library in linked} - names):
        yield f"licenses/{name} is missing"
    for wheel in release.wheels:
        with zipfile.ZipFile(wheel) as archive:
            names_in = (name for name in archive.namelist() if ".dist-info/licenses/" in name)
            found = {name.rpartition("/")[2] for name in names_in if not name.endswith("/")}  # a folder
        if found != names:
            yield f"{wheel.name} differs in {', '.join(sorted(found ^ names))}"


def rendering(release: Release) -> Findings:
    """the README can be shown by an index"""
    archives = [*release.sdists, *release.wheels]
    status, said = run("twine", "check", "--strict", *archives)
    if status:
        yield said


def links(release: Release) -> Findings:
    """the README's links lead somewhere from there"""
    for archive in [*release.sdists, *release.wheels][:1]:
        if relative := sorted(set(RELATIVE_LINK.findall(str(release.metadata(archive).get_payload())))):
            yield (
                f"{len(relative)} lead into the repository, such as {relative[0]}. Where that has an address, let "
                "pyproject.toml put it before them (scikit_build_core.metadata.fancy_pypi_readme)"
            )


def hosted(release: Release) -> Findings:
    """the hosted workflow has no errors, and builds for every Python on both processors"""
    workflows = release.root / ".github" / "workflows"
    for command in (
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *sorted(workflows.iterdir())),
        ("zizmor", "--offline", "--quiet", "--no-progress", workflows),
    ):
        status, said = run(*command)
        if status:
            yield said
    status, said = run(
        "cibuildwheel", "--print-build-identifiers", "--platform=linux", "--archs=x86_64,aarch64", release.root
    )
    wanted = {f"cp3{minor}-manylinux_{machine}" for minor in PYTHONS for machine in ("x86_64", "aarch64")}
    if status or wanted != set(said.split()):
        yield f"cibuildwheel would build {said}"


CHECKS: list[Callable[[Release], Findings]] = [
    *(one_version, changelog, tag, golden_files, files, contents, licenses, rendering, links, hosted)
]


def main(root: Path, dist: Path) -> int:
    release = Release(root, dist)
    print(f"lazyckpt {release.version}")
    status = 0
    for check in CHECKS:
        findings = list(check(release))
        print("  no " if findings else "  yes", check.__doc__)
        for finding in findings:
            status = 1
            print("       ", finding)
    for archive in [*release.sdists, *release.wheels]:
        print(f"  sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}")
    return status


if __name__ == "__main__":
    sys.exit(main(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")))
