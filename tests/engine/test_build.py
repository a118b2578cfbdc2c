"""A wheel as users get it, installed and used elsewhere; and builds where something is missing.

The wheel is built from an sdist, unless LAZYCKPT_WHEEL names one, as `make wheel-test` does: that one is also used.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trials import TORTURE

pytestmark = pytest.mark.long  # a wheel takes a minute

ROOT = Path(__file__).parents[2]

SAVE_AND_LOAD = (Path(__file__).parent / "installed.py").read_text()

# Resumes a run, and prints from which step and what came out; then the same for a run without interruption. The first
# time, it dies while the checkpoint of step 6 is written.
TRAIN = """
import hashlib, os, signal, torch, lazyckpt

def train(folder, fatal_step=0):
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(8, 1000)
    with lazyckpt.Checkpointer(folder, keep_last=2) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        begin = checkpointer.restore() or 0
        for step in range(begin + 1, 11):
            (model(data) - data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = checkpointer.save(step)
            if step == fatal_step:
                os.kill(os.getpid(), signal.SIGKILL)
            handle.result()
    print(begin, hashlib.sha256(model.weight.detach().numpy()).hexdigest())

torch.set_num_threads(1)
train("run", fatal_step=0 if os.path.exists("run") else 6)
train("whole")
"""

# Trains for so many steps, or on to so many.
LIGHTNING = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lazyckpt.integrations.lightning import LazyCheckpointIO

newest = ModelCheckpoint("lightning", every_n_train_steps=2, save_last="link")
trainer = Trainer(
    max_steps=int(sys.argv[1]), plugins=[LazyCheckpointIO()], callbacks=[newest], accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
)
trainer.fit(BoringModel(), ckpt_path="last")
print(trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
"""

# Hardening needs an optimizer, and nothing here a good one: all other tests run an engine that has it.
QUICKLY = [
    "--config-settings=cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
    "--config-settings=cmake.define.CMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the files of an sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("LAZYCKPT_WHEEL"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    run(*command, *([] if TORTURE else QUICKLY), "--wheel-dir", folder, sdist)
    assert not (sdist / "build").exists()  # regression: every `pip install .` left 20 MB there
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def library(wheel: Path, tmp_path: Path) -> Path:
    """Returns the engine of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".so"))
        return Path(archive.extract(name, tmp_path))


def processor(wheel: Path) -> str:
    """Returns which one the wheel is for. `make wheel MACHINE=…` builds one for another than this one."""
    return "x86_64" if wheel.stem.endswith("x86_64") else wheel.stem.rpartition("_")[2]


def clean(**more: str) -> dict[str, str]:
    unrelated = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAZYCKPT", "SKBUILD", "CMAKE"))}
    return unrelated | more


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sdist_holds_what_a_build_needs_and_nothing_else(sdist: Path) -> None:
    folders = ("csrc", "lazyckpt", "integrations", "licenses")
    listed = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", *folders).split()
    needed = {*listed, "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}
    assert {str(p.relative_to(sdist)) for p in sdist.rglob("*") if p.is_file()} == needed


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if not n.endswith("/")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX").replace(platform.machine(), processor(wheel))
    assert [n for n in names if n.endswith(".so")] == [f"lazyckpt/_engine{suffix}"]  # or else Python does not find it
    for needed in ("__init__.py", "py.typed", "_engine.pyi", "integrations/__init__.py", "cli/__init__.py"):
        if (ROOT / "lazyckpt" / needed).exists() or (ROOT / needed).exists():
            assert f"lazyckpt/{needed}" in names
    assert all(n.startswith(("lazyckpt/", "lazyckpt-")) for n in names)
    assert not [n for n in names if n.endswith((".cc", ".h", ".pyc", ".map")) or "test" in n]
    texts = {n.rpartition("/")[2] for n in names if ".dist-info/licenses/" in n}
    assert texts == {"LICENSE", *(p.name for p in (ROOT / "licenses").iterdir())}  # of the libraries that it holds


def test_wheel_needs_only_the_c_and_cpp_libraries(library: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-W", "-d", library))
    allowed = ("libstdc++.", "libgcc_s.", "libc.", "libm.", "libpthread.", "libdl.", "ld-linux-")
    assert needed and not [n for n in needed if not n.startswith(allowed)]


@pytest.mark.skipif("LAZYCKPT_WHEEL" not in os.environ, reason="a wheel for this machine's libraries")
def test_wheel_needs_no_newer_glibc(wheel: Path, library: Path) -> None:
    (promised,) = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
    needed = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", run("readelf", "-W", "-V", library))
    assert needed and max((int(a), int(b)) for a, b in needed) <= tuple(map(int, promised))


class Elsewhere:
    """A user's machine: not root, no compiler, an environment that borrows torch and what torch needs from this one."""

    def __init__(self, home: Path) -> None:
        self.folder = home
        home.chmod(0o777)
        self.environment = {"PATH": str(home / "venv" / "bin"), "HOME": str(home)}
        self.run(sys.executable, "-m", "venv", "--without-pip", "venv")
        borrowed = home / "borrowed"
        borrowed.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.suffix != ".pth" and "lazyckpt" not in entry.name:
                (borrowed / entry.name).symlink_to(entry)
        site = self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(site, "borrowed.pth").write_text(f"{borrowed}\n")

    def run(self, *command: object, status: int = 0) -> str:
        words = list(map(str, command))
        words[0] = shutil.which(words[0], path=self.environment["PATH"]) or words[0]
        if os.geteuid() == 0:  # it may read this Python, even below /root
            capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
            words = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *capability, *words]
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def machine(wheel: Path) -> Iterator[Elsewhere]:
    if "LAZYCKPT_WHEEL" not in os.environ:
        pytest.skip("make wheel-test uses it")
    if processor(wheel) != platform.machine():
        pytest.skip("scripts/wheel/emulate.sh uses it")
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        machine = Elsewhere(Path(home))
        copy = shutil.copy(wheel, home)
        machine.run(
            sys.executable, "-m", "pip", "--python", "venv/bin/python", "install", "--quiet", "--no-index", copy
        )
        yield machine


@pytest.fixture
def elsewhere(machine: Elsewhere) -> Iterator[Elsewhere]:
    """That machine, with the wheel installed, in an empty folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        machine.folder = Path(folder)
        machine.folder.chmod(0o777)
        yield machine


def test_installed_wheel_works_elsewhere(elsewhere: Elsewhere) -> None:
    assert elsewhere.run("python", "-c", SAVE_AND_LOAD).startswith("works")
    said = elsewhere.run("lazyckpt", "doctor", ".")
    assert "test build" not in said and "built without" not in said and "checksums by libdeflate" in said


@pytest.mark.skipif("LAZYCKPT_WHEEL" not in os.environ, reason="a wheel of this machine's compiler")
def test_wheel_has_fast_checksums(wheel: Path, library: Path) -> None:
    """Regression: libdeflate did not know the compiler, and left out its vector instructions."""
    if processor(wheel) == "x86_64":
        assert "vpclmul" in run("objdump", "--disassemble", library)
        return
    (text,) = (line.split() for line in run("readelf", "-W", "-S", library).splitlines() if " .text " in line)
    begin, size = (int(number, 16) for number in text[-7:-5])
    code = library.read_bytes()[begin : begin + size]
    for bits, mask in ((0x9AC04C00, 0xFFE0FC00), (0x0EE0E000, 0xBFE0FC00), (0xCE000000, 0xFFE08000)):
        # crc32x, pmull, and eor3, in which the operands' registers are left out. Objdump knows one processor.
        assert sum(word & mask == bits for (word,) in struct.iter_unpack("<I", code)) > 3


def test_installed_wheel_resumes_after_a_kill(elsewhere: Elsewhere) -> None:
    elsewhere.run("python", "-c", TRAIN, status=-signal.SIGKILL)
    (begin, resumed), (zero, whole) = (line.split() for line in elsewhere.run("python", "-c", TRAIN).splitlines())
    assert begin in ("5", "6") and zero == "0" and resumed == whole


def test_installed_wheel_trains_with_lightning(elsewhere: Elsewhere) -> None:
    for steps in ("4", "6"):
        assert elsewhere.run("python", "-c", LIGHTNING, steps).splitlines()[-1] == f"{steps} {steps}"
    assert (elsewhere.folder / "lightning" / "epoch=0-step=6.ckpt").exists()


def test_the_engine_is_hardened(wheel: Path, library: Path) -> None:
    """The wheel has the hardening of csrc/CMakeLists.txt, as far as the compiler supports it."""
    headers = run("readelf", "-W", "-l", library)
    (stack,) = (line for line in headers.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in headers and " RW " in stack
    assert "GNU_RELRO" in headers
    dynamic = run("readelf", "-W", "-d", library)
    assert "BIND_NOW" in dynamic
    assert "TEXTREL" not in dynamic and "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = run("readelf", "-W", "--dyn-syms", library)
    assert "__stack_chk_fail" in symbols  # -fstack-protector-strong
    assert "_chk@" in symbols.replace("__stack_chk_fail@", "")  # _FORTIFY_SOURCE
    # Assertions of libstdc++. Those of libc++ leave no name.
    assert (
        "GLIBCXX" not in symbols or "__glibcxx_assert_fail" in symbols or b"__n < this->size()" in library.read_bytes()
    )
    (entry,) = (int(line.split()[1], 16) for line in symbols.splitlines() if line.endswith(" PyInit__engine"))
    begin = entry - load_bias(headers, entry)
    # Functions begin with endbr64 (-fcf-protection), or with paciasp (-mbranch-protection).
    first = {"x86_64": b"\xf3\x0f\x1e\xfa", "aarch64": b"\x3f\x23\x03\xd5"}[processor(wheel)]
    assert library.read_bytes()[begin : begin + 4] == first


def test_the_engine_exports_nothing_else(library: Path) -> None:
    """Otherwise another zlib or C++ library in the process may take the place of the one that is linked in."""
    table = [line.split() for line in run("readelf", "-W", "--dyn-syms", library).splitlines()]
    defined = {row[7] for row in table if len(row) > 7 and row[0][:-1].isdigit() and row[6] != "UND"}
    assert defined == {"PyInit__engine"}


def load_bias(headers: str, address: int) -> int:
    """Returns the address minus the file offset of the segment that holds ``address``."""
    for line in headers.splitlines():
        if line.split()[:1] == ["LOAD"]:
            offset, begin, _, size = (int(number, 16) for number in line.split()[1:5])
            if begin <= address < begin + size:
                return begin - offset
    raise AssertionError("no segment holds it")


# Something is missing: the message says what, and how to get it.


def configure(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Returns the status and the output of cmake, as one line."""
    pybind11 = pytest.importorskip("pybind11")
    tools = sysconfig.get_path("scripts")
    done = subprocess.run(
        [
            *(f"{tools}/cmake", "-S", str(ROOT / "csrc"), "-B", str(folder / "build"), "-G", "Ninja"),
            *(f"-DCMAKE_MAKE_PROGRAM={tools}/ninja", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"),
            *(f"-DPython_EXECUTABLE={sys.executable}", *arguments),
        ],
        env=clean(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_without_optional_libraries_the_build_says_what_that_costs(tmp_path: Path) -> None:
    (found,) = run("pkg-config", "--variable=pcfiledir", "zlib").split()
    shutil.copy(f"{found}/zlib.pc", tmp_path)
    status, said = configure(tmp_path, PKG_CONFIG_LIBDIR=str(tmp_path))
    assert status == 0
    assert "lazyckpt: no liburing, so a thread pool writes. To have it, install Debian's liburing-dev" in said
    assert "lazyckpt: no libdeflate, so checksums take three times as long. To have it, install" in said
    rules = (tmp_path / "build" / "build.ninja").read_text()
    assert "LAZYCKPT_HAVE_LIB" not in rules and "libz" in rules


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {"PATH": "/nowhere"}, "needs a C++20 compiler. Install that (Debian, Ubuntu: apt-get install g++;"),
        ((), {"CXX": "cxx-9 -O2"}, "needs a C++20 compiler; CXX names cxx-9, which is not there"),
        (
            ("-DPython_INCLUDE_DIR=/nowhere",),
            {},
            "(Python.h). Install that (Debian, Ubuntu: apt-get install python3-dev",
        ),
        (("-DPKG_CONFIG_EXECUTABLE=/nowhere",), {}, "needs pkg-config. Install that (Debian, Ubuntu: apt-get install"),
        ((), {"PKG_CONFIG_LIBDIR": "/nowhere"}, "needs zlib. Install that (Debian, Ubuntu: apt-get install zlib1g-dev"),
    ],
    ids=["no compiler", "no such compiler", "no Python.h", "no pkg-config", "no zlib"],
)
def test_what_the_build_needs_is_named_with_its_package(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Regression: CMake's own messages ("CMAKE_CXX_COMPILER not set, after EnableLanguage") name no package."""
    if "PATH" in environment and "CXX" in os.environ:
        pytest.skip("CXX names a compiler")
    status, output = configure(tmp_path, *arguments, **environment)
    assert status != 0 and said in output


def set_up(machine: Path, *, compiler: bool, libraries: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/system-packages.sh on a machine with apt-get, but without the permission to install."""
    programs = {"id": "echo 1000", "sudo": "exit 1", "apt-get": "exit 1", "unzip": "", "c++": ""}
    programs["pkg-config"] = f'case " {libraries} " in *" $2 "*) ;; *) exit 1 ;; esac'
    for name, does in programs.items():
        if compiler or name != "c++":
            (machine / name).write_text(f"#!/bin/sh\n{does}\n")
            (machine / name).chmod(0o755)
    environment = {"PATH": str(machine), "PYTHON": sys.executable}
    command = ["/bin/sh", str(ROOT / "scripts" / "system-packages.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_setup_goes_on_without_what_is_only_useful(tmp_path: Path) -> None:
    done = set_up(tmp_path, compiler=True, libraries="zlib")
    assert done.returncode == 0
    assert "Continuing without: liburing-dev libdeflate-dev." in done.stderr
    assert "sudo apt-get update && sudo apt-get install --yes liburing-dev libdeflate-dev" in done.stderr
    assert set_up(tmp_path, compiler=True, libraries="zlib liburing libdeflate").stderr == ""


def test_setup_stops_without_what_the_build_needs(tmp_path: Path) -> None:
    done = set_up(tmp_path, compiler=False, libraries="liburing")
    assert done.returncode == 1
    assert "packages that are missing: g++ zlib1g-dev. Install them" in done.stderr
    assert "apt-get install --yes g++ zlib1g-dev libdeflate-dev" in done.stderr


def test_what_setup_installs_is_pinned() -> None:
    """Every package that the tests need is pinned, with the same torch as pyproject.toml and no index."""
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", text, re.MULTILINE))
    needed = (ROOT / "pyproject.toml").read_text().partition("\ndev = [")[2].partition("\n]")[0]
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r'^  "([\w-]+)', needed, re.MULTILINE)]
    assert len(names) > 15 and set(names) <= pins.keys()
    assert f'"torch=={pins["torch"]}"' in needed
    assert "://" not in text and "--" not in text
