"""Our declarations of the CUDA driver's functions match the Toolkit's header, if there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from fake_cuda import FLAGS, HERE, compiler

CSRC = HERE.parent.parent / "csrc"

# A parameter is the same if it is passed alike: their enums are of their own types, which we do not repeat.
SAME = """
template <class Ours, class Theirs>
constexpr bool Same() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return Same<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>();
  } else if constexpr (std::is_enum_v<Theirs>) {
    return (std::is_enum_v<Ours> || std::is_same_v<Ours, int>) && sizeof(Ours) == sizeof(Theirs);
  } else {
    return std::is_same_v<Ours, Theirs>;
  }
}
template <>
constexpr bool Same<lazyckpt::cuda::CUmemcpyAttributes, ::CUmemcpyAttributes>() { return true; }  // compared below

template <class Member, class Theirs>
struct Signature;
template <class... Ours, class... Theirs>
struct Signature<const lazyckpt::cuda::Function<Ours...>, CUresult(Theirs...)> {
  static constexpr bool Fits() {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) return (Same<Ours, Theirs>() && ...);
    return false;
  }
};
#define FUNCTION(member, symbol) \\
  static_assert(Signature<decltype(lazyckpt::cuda::Driver::member), decltype(::symbol)>::Fits(), #symbol)
#define FIELD(type, field)                                                               \\
  static_assert(offsetof(lazyckpt::cuda::type, field) == offsetof(::type, field) &&      \\
                    sizeof(lazyckpt::cuda::type::field) == sizeof(::type::field) &&      \\
                    sizeof(lazyckpt::cuda::type) == sizeof(::type), #type "." #field)
"""


def toolkits() -> list[Path | None]:
    """Returns folders with a cuda.h of 12.8 or newer, which has cuMemcpyBatchAsync; the newest first."""
    folders = [Path(place, "include") for place in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if place]
    nvidia = importlib.util.find_spec("nvidia")
    for place in nvidia.submodule_search_locations or () if nvidia else ():
        folders += Path(place).glob("*/include")
    found: dict[int, Path] = {}
    for folder in folders:
        if (folder / "cuda.h").exists():
            version = re.search(r"#define CUDA_VERSION (\d+)", (folder / "cuda.h").read_text())
            if version and int(version[1]) >= 12080:
                found[int(version[1])] = folder
    return [found[version] for version in sorted(found, reverse=True)] or [None]


@pytest.fixture(params=toolkits()[:1], ids=str)
def toolkit(request: pytest.FixtureRequest) -> list[str]:
    """Returns the compiler's arguments for a header."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    if request.param is None:
        pytest.skip("no cuda.h of 12.8 or newer: neither in CUDA_HOME or /usr/local/cuda, nor in a wheel")
    return ["-isystem", str(request.param)]


def compiles(source: str, flags: list[str], folder: Path) -> str:
    """Returns the compiler's complaints."""
    file = folder / "headers.cc"
    file.write_text(source)
    command = [compiler() or "", "-std=c++20", "-fsyntax-only", *flags, str(file)]
    return subprocess.run(command, capture_output=True, text=True).stderr


def constants(header: str) -> list[tuple[str, str]]:
    """Returns the names and values of the constants that a header repeats."""
    found = re.findall(r"\b(CU(?:DA)?_[A-Z0-9_]+) = (\w+)", header)
    assert len(found) > 5
    return found


def assertion(name: str, value: str) -> str:
    return f'static_assert(static_cast<long>({name}) == {value}, "{name}");'


def program(folder: Path) -> str:
    """Checks cuda_driver.h against cuda.h: each constant, each struct, each function under its exact name."""
    header = (folder / "device" / "cuda_driver.h").read_text()
    functions = re.findall(r'\b(cu\w+) =\s+Find_\{this, "(\w+)"', header)
    assert len(functions) == header.count("Find_{this,") > 20
    lines = ["#define __CUDA_API_VERSION_INTERNAL  // every version under its exact name, none renamed by a macro"]
    lines += ["#include <cuda.h>", "#include <type_traits>"]
    lines += [line for name, value in constants(header) for line in (assertion(name, value), f"#undef {name}")]
    lines += ['#include "device/cuda_driver.h"', SAME]
    lines += [f"FUNCTION({member}, {symbol});" for member, symbol in functions]
    for struct, body in re.findall(r"struct (CU\w+) \{(.*?)\};", header, re.DOTALL):
        lines += [f"FIELD({struct}, {field});" for field in re.findall(r"(\w+);", body)]
    return "\n".join(lines) + "\n"


def test_the_engine_declares_the_driver_as_it_is(toolkit: list[str], tmp_path: Path) -> None:
    assert compiles(program(CSRC), [f"-I{CSRC}", *toolkit], tmp_path) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ('"cuMemcpyDtoHAsync_v2"', '"cuMemcpyDtoHAsync"', "cuMemcpyDtoHAsync"),  # 32-bit pointers
        ('"cuMemcpyBatchAsync"', '"cuMemcpyBatchAsync_v2"', "cuMemcpyBatchAsync_v2"),  # eight arguments
        ("CU_MEMHOSTREGISTER_PORTABLE = 1", "CU_MEMHOSTREGISTER_PORTABLE = 2", "CU_MEMHOSTREGISTER_PORTABLE"),
        ("CUmemLocation srcLocHint;", "CUmemLocationType srcLocHint;", "CUmemcpyAttributes.srcLocHint"),
    ],
)
def test_what_is_declared_otherwise_is_noticed(
    toolkit: list[str], tmp_path: Path, right: str, wrong: str, complaint: str
) -> None:
    altered = tmp_path / "csrc"
    (altered / "device").mkdir(parents=True)
    for name in ("device/cuda_driver.h", "status.h"):
        (altered / name).write_text((CSRC / name).read_text().replace(right, wrong))
    errors = compiles(program(altered), [f"-I{altered}", *toolkit], tmp_path)
    assert "error:" in errors and complaint in errors


def test_the_fake_exports_the_driver_as_it_is(toolkit: list[str], tmp_path: Path) -> None:
    """The fake compiles with the Toolkit's declarations and has the same constants."""
    abi = (HERE / "abi.h").read_text()
    checks = [
        "#define FAKE_CUDA_TOOLKIT",
        '#include "driver.cc"',
        *(assertion(*constant) for constant in constants(abi)),
    ]
    flags = [*toolkit, f"-I{HERE}", *(flag for flag in FLAGS if not flag.startswith("-std"))]
    assert compiles("\n".join(checks) + "\n", flags, tmp_path) == ""
