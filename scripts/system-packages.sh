#!/bin/sh
# Installs the Debian packages that the build and the tests use and the machine lacks. Where it cannot, it says which,
# and fails if the build needs one of them.
set -eu
has() { pkg-config --exists "$1" 2>/dev/null; }
compiler="${CXX:-c++}"
needed="" useful=""
command -v "${compiler%% *}" >/dev/null || needed="$needed g++"
command -v pkg-config >/dev/null || needed="$needed pkg-config"
has zlib || needed="$needed zlib1g-dev"
"${PYTHON:-python3}" -c 'import ensurepip, sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
  2>/dev/null || needed="$needed python3-venv python3-dev"
has liburing || useful="$useful liburing-dev"
has libdeflate || useful="$useful libdeflate-dev"
command -v unzip >/dev/null || useful="$useful unzip"
missing="$needed$useful"
[ -z "$missing" ] && exit 0

install() {
  command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else return 1; fi
  echo "Installing:$missing"
  $sudo apt-get update --quiet --quiet || return 1
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install --yes --quiet --no-install-recommends $missing
}
install && exit 0
how="  sudo apt-get update && sudo apt-get install --yes$missing"
command -v apt-get >/dev/null || how="  (these are Debian's names; take what your distribution calls them)"
if [ -n "$needed" ]; then
  echo "The build needs packages that are missing:$needed. Install them, then make again:" >&2
  echo "$how" >&2
  exit 1
fi
echo "Continuing without:$useful. lazyckpt works, but may be slower; \`lazyckpt doctor\` tells what that costs." >&2
echo "To have them, install them, remove .venv/.tools, and make again:" >&2
echo "$how" >&2
