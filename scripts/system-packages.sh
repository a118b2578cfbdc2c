#!/bin/sh
# Installs the Debian packages that the build needs and the machine lacks; without root, says which.
set -eu
missing=""
has() { dpkg-query --show --showformat='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }
for package in liburing-dev libdeflate-dev zlib1g-dev pkg-config; do
  has "$package" || missing="$missing $package"
done
command -v c++ >/dev/null || missing="$missing g++"
command -v unzip >/dev/null || missing="$missing unzip"
"${PYTHON:-python3}" -c 'import ensurepip, sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
  2>/dev/null || missing="$missing python3-venv python3-dev"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else
  echo "Packages are missing. Run this once, then make again:" >&2
  echo "  sudo apt-get update && sudo apt-get install --yes$missing" >&2
  exit 1
fi
echo "Installing:$missing"
$sudo apt-get update --quiet --quiet
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $sudo apt-get install --yes --quiet --no-install-recommends $missing
