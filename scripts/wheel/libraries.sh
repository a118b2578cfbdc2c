#!/bin/sh
# Builds the libraries that the wheel links in, and puts headers, archives and .pc files into DIR/usr:
#   sh scripts/wheel/libraries.sh [--sources] DIR
# The compiler is the first cc on PATH. apt fetches the sources into DIR/sources, from Debian's pool; without apt, put
# them there before. With --sources, that is all. The terms of each library stand in licenses/, so the script stops
# where its source says otherwise.
set -eu
only_sources=false
test "$1" = --sources && only_sources=true && shift
sources="liburing-dev liburing_2.3.orig.tar.gz 2eac26f880125d83f75ba8641fde5d88226dd352d3cee95d45a9128758a8f1be
libdeflate-dev libdeflate_1.23.orig.tar.gz 1ab18349b9fb0ce8a0ca4116bded725be7dcbfa709e19f6f983d99df1fb8b25f
zlib1g-dev zlib_1.2.13.dfsg.orig.tar.bz2 71feb7947e3c00ef125f83b79a4e529bde31171e5babe48b391f06758d1ab0a1"
flags="-O2 -fPIC"
licenses=$PWD/licenses
mkdir -p "$1/sources"
cd "$1"

# Fetches the file $2 from where apt would get the package $1.
fetch() {
  from=$(apt-get download --print-uris "$1" | sed -n "s,^'\(.*\)/[^/]*'.*,\1,p")
  /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file "$from/$2" "sources/$2" "SHA256:$3"
}

# Runs a command in the folder $1 and prints what it said only if it fails.
within() {
  (cd "$1" && shift && "$@") >log 2>&1 || { cat log >&2 && exit 1; }
}

# Describes the library $1, version $2, which the linker knows as $3, to pkg-config.
describe() {
  printf 'Name: %s\nDescription: in the wheel\nVersion: %s\nLibs: -L%s/usr/lib -l%s\nCflags: -I%s/usr/include\n' \
    "$1" "$2" "$PWD" "$3" "$PWD" >"usr/lib/pkgconfig/$1.pc"
}

echo "$sources" | while read -r package file sum; do
  test -f "sources/$file" || fetch "$package" "$file" "$sum"
  echo "$sum  sources/$file" | sha256sum --check --quiet
done
! "$only_sources" || exit 0

rm -rf usr liburing-* libdeflate-* zlib-*
mkdir -p usr/include usr/lib/pkgconfig
for source in sources/*; do tar xf "$source"; done

cmp liburing-2.3/LICENSE "$licenses/liburing.txt"
within liburing-2.3 ./configure --cc=cc --cxx=false
within liburing-2.3/src make liburing.a AR=ar RANLIB=ranlib CFLAGS="$flags -fno-stack-protector" # it has no libc
cp -r liburing-2.3/src/include/* usr/include/
cp liburing-2.3/src/liburing.a usr/lib/
describe liburing 2.3 uring

# Before 1.23 it finds no vector instructions in new clangs, which makes checksums five times as slow; the feature
# evex512, which it sets to be sure, is gone from them.
cmp libdeflate-1.23/COPYING "$licenses/libdeflate.txt"
sed -i 's/",\(no-\)\{0,1\}evex512"/""/' libdeflate-1.23/lib/x86/cpu_features.h
within libdeflate-1.23 sh -c "cc $flags -c lib/*.c lib/*/*.c && ar rcs libdeflate.a *.o"
cp libdeflate-1.23/libdeflate.h usr/include/
cp libdeflate-1.23/libdeflate.a usr/lib/
describe libdeflate 1.23 deflate

cmp zlib-1.2.13.dfsg/LICENSE "$licenses/zlib.txt"
within zlib-1.2.13.dfsg env CC=cc AR=ar RANLIB=ranlib CFLAGS="$flags" ./configure --static
within zlib-1.2.13.dfsg make libz.a
cp zlib-1.2.13.dfsg/zlib.h zlib-1.2.13.dfsg/zconf.h usr/include/
cp zlib-1.2.13.dfsg/libz.a usr/lib/
describe zlib 1.2.13 z
