"""The engine under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: tests/sanitize/stress.cc."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fake_cuda import build

ROOT = Path(__file__).parent.parent
ROUNDS = 200 if os.environ.get("LAZYCKPT_TORTURE") else 20
# liburing maps and unmaps its queues by bare system calls, so that a new queue at an old one's address looks like it.
SUPPRESSIONS = "race:/usr/include/liburing.h\nrace:/usr/include/liburing/*\nrace_top:csrc/io_uring.cc\n"
NOT_NEEDED = ("bindings.cc", "probe.cc", "tensors.cc")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++20", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{ROOT / 'csrc'}"]
    flags += [f"-DLAZYCKPT_{name}" for name in ("FAULTS", "HAVE_LIBURING", "HAVE_LIBDEFLATE")]
    sources = [s for s in (ROOT / "csrc").glob("*.cc") if s.name not in NOT_NEEDED]
    sources.append(ROOT / "tests" / "sanitize" / "stress.cc")

    def compile_one(source: Path) -> Path:
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = tmp_path / "stress"
    libraries = ["-luring", "-ldeflate", "-lz", "-lpthread"]
    subprocess.run([compiler, *flags, *objects, "-o", program, *libraries], check=True)
    folder = tmp_path / "files"
    folder.mkdir()
    seed = str(random.SystemRandom().randrange(1 << 32))
    # No randomisation of addresses: older ThreadSanitizers do not know the memory maps of newer kernels.
    command = [program, folder, seed, str(ROUNDS)]
    if sanitizer == "thread" and shutil.which("setarch"):
        command = ["setarch", "--addr-no-randomize", *command]
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    environment = {
        **os.environ,
        "LAZYCKPT_CUDA_LIBRARY": str(build()),
        "TSAN_OPTIONS": f"suppressions={suppressions}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=environment)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    assert list(folder.iterdir()) == []
