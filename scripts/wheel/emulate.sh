#!/bin/sh
# Uses the arm64 wheel of dist on this machine: installs it for a Python for arm64, which qemu interprets, and tests it.
#   PYTHON=.venv/bin/python sh scripts/wheel/emulate.sh [TEST …]
# That Python is of the version that the wheel is for; Debian must have this version, too. Everything is unpacked into
# build/wheel/emulated; nothing is installed on this machine.
set -eu
wheel=$(ls "$PWD"/dist/*_aarch64.whl)
folder=$PWD/build/wheel/emulated
name=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
packages=$folder/venv/lib/$name/site-packages
export APT_CONFIG="$folder/apt.conf"
# The newest whose arm64 wheel brings no CUDA. What else is in constraints.txt holds.
torch=2.10.0

# Fetches Debian's packages for arm64 with what they need, as if this were an empty machine.
fetch() {
  mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
  : >"$folder/apt/status"
  printf '%s;\n' 'APT::Architecture "arm64"' "APT::Architectures { \"arm64\"; \"$(dpkg --print-architecture)\"; }" \
    "Dir::State \"$folder/apt\"" "Dir::State::status \"$folder/apt/status\"" "Dir::Cache \"$folder/apt\"" \
    'APT::Sandbox::User "root"' 'APT::Install-Recommends "false"' >"$APT_CONFIG"
  apt-get -qq update
  apt-get -qq install --download-only "$name" libgomp1 libstdc++6 "qemu-user-static:$(dpkg --print-architecture)"
}

# Installs for arm64 without running a Python for it, which takes ten times as long. pip asks for the machine where
# requirements depend on it.
install() {
  "$PYTHON" -c "
import platform, sys
platform.machine = lambda: 'aarch64'
from pip._internal.cli.main import main
sys.exit(main())" install --quiet --quiet --no-warn-conflicts --upgrade --target "$packages" --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
}

if ! test "$folder/ready" -nt "$0" || ! test "$folder/ready" -nt constraints.txt; then
  echo "Fetching $name and torch for arm64, and qemu …"
  rm -rf "$folder"
  fetch
  for package in "$folder"/apt/archives/*.deb; do dpkg -x "$package" "$folder/root"; done
  rm -rf "$folder/apt"

  # A virtual environment whose Python is a script, so that the processes that it starts are interpreted, too: it takes
  # sys.executable from the name that it was called by. The prefix is the environment's since pyvenv.cfg lies there.
  mkdir -p "$folder/venv/bin"
  printf '#!/bin/sh\nexec "%s" -L "%s" -0 "$0" "%s" "$@"\n' "$folder/root/usr/bin/qemu-aarch64-static" \
    "$folder/root" "$folder/root/usr/bin/$name" >"$folder/venv/bin/python"
  chmod +x "$folder/venv/bin/python"
  echo "home = $folder/root/usr/bin" >"$folder/venv/pyvenv.cfg"

  grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
  install -c "$folder/constraints.txt" "torch==$torch" \
    numpy rich typer pytest pytest-timeout pytest-xdist hypothesis expecttest psutil safetensors
  touch "$folder/ready"
fi

install --no-deps --no-index "$wheel"

used=$(mktemp -d)
trap 'rm -rf "$used"' EXIT
(cd "$used" && "$folder/venv/bin/python" -P "$OLDPWD/tests/engine/installed.py")

# Tests that start few processes, each of which needs a minute to import torch, and that compile nothing. qemu has no
# io_uring. All import the package that is installed, not the one in this folder.
test $# -gt 0 || set -- tests/engine/test_engine.py tests/engine/test_reader.py tests/engine/test_capture.py \
  tests/engine/test_ring.py tests/engine/test_tensors.py tests/formats
PYTHONSAFEPATH=1 "$folder/venv/bin/python" -m pytest -p no:cacheprovider --timeout=1500 -m 'not slow' \
  -k 'not io_uring' "$@"
