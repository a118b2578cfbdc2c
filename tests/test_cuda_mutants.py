"""The orders that keep a checkpoint whole on a device, each removed in turn: the tests must notice."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What goes wrong, the file, the line, and what stands there instead.
MUTANTS = {
    "copies do not wait for training": (
        "csrc/device_cuda.cc",
        "if (status.ok()) status = Call(driver_->cuStreamWaitEvent, lane, mark_, CU_EVENT_WAIT_DEFAULT);",
        "(void)lane;",
    ),
    "training does not wait for copies": (
        "csrc/device_cuda.cc",
        "if (status.ok()) status = Call(driver_->cuStreamWaitEvent, Stream(stream), mark_, CU_EVENT_WAIT_DEFAULT);",
        "(void)stream;",
    ),
    "nor for eager ones": (
        "csrc/engine.cc",
        "if ((devices >> s.device & 1) != 0) RunAfterCopies(job, Lane::kEager, s);",
        "(void)s;",
    ),
    "the step waits for eager copies alone": (
        "csrc/engine.cc",
        "for (const Lane lane : {Lane::kEager, Lane::kLazy}) RunAfterCopies(job, lane, s);",
        "RunAfterCopies(job, Lane::kEager, s);",
    ),
    "the step does not wait for what is not enqueued": (
        "csrc/engine.cc",
        "if (!HelpUntil([&job, owners] { return job.enqueued(owners); }, deadline)) return false;",
        "",
    ),
    "save does not wait for what is not enqueued": (
        "csrc/engine.cc",
        "return job.error.ok() ? job.eager_left == 0 : job.copying == 0;",
        "return true;",
    ),
    "a copy is complete before it is": (
        "csrc/device_cuda.cc",
        "const auto wait = [&] { return Call(driver_->cuEventSynchronize, event); };",
        "const auto wait = [&] { return Status::Ok(); };",
    ),
    "the done-event stands before the copies": (
        "csrc/device_cuda.cc",
        "if (done.ok()) done = Enqueue(copies, lane, pinned);",
        "if (done.ok()) done = Call(driver_->cuEventRecord, event, StreamOf(lane));\n"
        "if (done.ok()) return Enqueue(copies, lane, pinned);",
    ),
    "batches are read in any order": (
        "csrc/device_cuda.cc",
        "attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;",
        "attributes.srcAccessOrder = static_cast<CUmemcpySrcAccessOrder>(3);",
    ),
    "copies cross what is pinned": (
        "csrc/capture.cc",
        "if (chunk->devices != 0) cuts = CutsIn(",
        "if (false) cuts = CutsIn(",
    ),
    "copies go on when their checkpoint is over": (
        "csrc/device_cuda.cc",
        "if (done.ok()) done = Call(driver_->cuEventSynchronize, event);",
        "",
    ),
    "a captured stream is told to wait": ("csrc/engine.cc", "if (capturing) return WaitUntil(captured, deadline);", ""),
    "captures of other threads are in the way": (
        "csrc/device_cuda.cc",
        "CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;",
        "CUstreamCaptureMode mode{};",
    ),
    "the ring is unpinned under copies": (
        "csrc/engine.cc",
        "    if (gpu != nullptr) StopLanes(*gpu);",
        "    if (gpu != nullptr) {\n"
        "      for (const auto& pin : std::exchange(pins_, {})) pinner_->Unpin(pin);\n"
        "      StopLanes(*gpu);\n"
        "    }",
    ),
    "the small buffer is filled again before it is emptied": (
        "csrc/capture.cc",
        "const std::byte* const bounce = chunk->bounce;",
        "const std::byte* const bounce = chunk->bounce;\n"
        "if (bounce != nullptr) idle_bounces_.push_back(std::exchange(chunk->bounce, nullptr));\n"
        "changed_.notify_all();",
    ),
    "the small buffer is filled again before it is full": (
        "csrc/capture.cc",
        "if (chunk->eager) --job.eager_left;",
        "if (chunk->eager) --job.eager_left;\nif (chunk->bounce) idle_bounces_.push_back(chunk->bounce);",
    ),
    "restore fills the small buffer again before it is copied": (
        "csrc/capture.cc",
        "std::memcpy(bounce, from.data() + done, piece.size());",
        "std::memcpy(bounce, from.data() + done, piece.size());\nLocked([&] { idle_bounces_.push_back(bounce); });",
    ),
    "any optimizer is trusted to the stream": (
        "lazyckpt/snapshot.py",
        "self._wait(owners, on_device=is_of_torch(owner))",
        "self._wait(owners, on_device=True)",
    ),
    "replays do not wait": ("lazyckpt/gate.py", "with gate.step(*self._steps):", "with contextlib.nullcontext():"),
    "replayed steps are lazy": ("lazyckpt/ownership.py", " and gate.replayed.get(owner, True)", ""),
}


class Build:
    """The package with an engine made of its sources, one of them changed."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self.folder = folder
        self._compiler = compiler
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copytree(ROOT / "lazyckpt", folder / "lazyckpt", ignore=shutil.ignore_patterns("_engine*.so"))
        (folder / "objects").mkdir()
        pybind11 = importlib.import_module("pybind11")
        self._flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", f"-I{folder / 'csrc'}"]
        self._flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        self._flags += [f"-DLAZYCKPT_{name}" for name in ("FAULTS", "HAVE_LIBURING", "HAVE_LIBDEFLATE")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, sorted((folder / "csrc").glob("*.cc"))))

    def _compile(self, source: Path) -> None:
        if source.suffix != ".cc":
            return
        target = self.folder / "objects" / f"{source.stem}.o"
        subprocess.run([self._compiler, *self._flags, "-c", source, "-o", target], check=True)

    def change(self, name: str, old: str, new: str) -> Callable[[], None]:
        """Links the engine with one file changed; the result undoes the change."""
        path = self.folder / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has changed: {old}"
        path.write_text(text.replace(old, new))
        self._compile(path)
        self.link()

        def undo() -> None:
            path.write_text(text)
            self._compile(path)

        return undo

    def link(self) -> None:
        target = self.folder / "lazyckpt" / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
        objects = sorted((self.folder / "objects").glob("*.o"))
        libraries = ["-luring", "-ldeflate", "-lz", "-lpthread", "-ldl"]
        subprocess.run([self._compiler, "-shared", *objects, "-o", target, *libraries], check=True)

    def tests_pass(self) -> bool:
        # An editable installation is found before sys.path.
        program = (
            "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in type(f).__name__"
            " and 'editable' not in type(f).__module__]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        )
        tests = [ROOT / "tests" / "test_cuda.py", ROOT / "tests" / "test_cuda_training.py"]
        options = ["-x", "-q", "--import-mode=importlib", "--timeout=60", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        done = subprocess.run(
            [sys.executable, "-c", program, *tests, *options],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 0


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    compiler = shutil.which("c++")
    if compiler is None or importlib.util.find_spec("pybind11") is None:
        pytest.skip("no C++ compiler or no pybind11")
    build = Build(tmp_path_factory.mktemp("mutants"), compiler)
    build.link()
    assert build.tests_pass(), "as it is"
    return build


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", MUTANTS)
def test_it_is_noticed(build: Build, what: str) -> None:
    undo = build.change(*MUTANTS[what])
    try:
        assert not build.tests_pass()
    finally:
        undo()
