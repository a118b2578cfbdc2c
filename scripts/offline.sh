#!/bin/sh
# For a machine without a network, such as one with a GPU that is lent for minutes:
#   sh scripts/offline.sh fetch DIR   elsewhere (Debian 12, x86-64): gets what that machine may lack, into DIR
#   sh scripts/offline.sh build DIR   there, in the repository: builds the engine in place; more for PYTHONPATH goes
#                                     to build/carried/python
# That machine has torch, rich, typer, pytest and hypothesis for a Python with headers, glibc 2.36 or newer, a C++
# compiler, make or ninja, cmake and pybind11. PYTHON names its Python, if that is not python3.
set -eu

# Peers, what they need besides torch, NumPy, PyYAML, aiofiles, aiohttp, psutil and safetensors; and for our tests.
wheels="torchsnapshot==0.1.0 torch_checkpointing==0.1.1 importlib_metadata==8.7.0 nest_asyncio==1.6.0 zipp==3.23.0
  pytest_timeout==2.4.0"
python=${PYTHON:-python3}
debs="libdeflate-dev liburing-dev zlib1g-dev pkgconf-bin libpkgconf3"

case "${1:-}" in
fetch)
  mkdir -p "$2/wheels" "$2/debs"
  # shellcheck disable=SC2086
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$2/wheels" $wheels
  cd "$2/debs"
  # shellcheck disable=SC2086
  apt-get download $debs
  ;;
build)
  root=$(pwd)/build/carried
  libraries=$root/usr/lib/x86_64-linux-gnu
  mkdir -p "$root"
  for deb in "$2"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  sed -i "s|=/usr|=$root/usr|" "$libraries"/pkgconfig/*.pc
  "$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade --target "$root/python" "$2"/wheels/*.whl
  if command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi
  LD_LIBRARY_PATH=$libraries PKG_CONFIG=$root/usr/bin/pkgconf PKG_CONFIG_LIBDIR=$libraries/pkgconfig \
    cmake -S csrc -B build/offline -DCMAKE_PREFIX_PATH="$root/usr" -DPython_EXECUTABLE="$(command -v "$python")" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
  cmake --build build/offline --parallel
  cp build/offline/_engine*.so lazyckpt/
  test -e lazyckpt/integrations || ln -s ../integrations lazyckpt/integrations
  "$python" -c "import lazyckpt.cli"
  ;;
*)
  sed -n '2,7p' "$0"
  exit 2
  ;;
esac
