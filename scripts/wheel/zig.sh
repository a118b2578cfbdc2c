#!/bin/sh
# A compiler that targets glibc 2.28, whatever this machine has. Links named cc, c++, ar and ranlib lead here.
# WHEEL_PYTHON is a Python that has ziglang, and MACHINE the processor that the wheel is for.
tool=$(basename "$0")
case "$tool" in
cc | c++) exec "$WHEEL_PYTHON" -m ziglang "$tool" -target "$MACHINE-linux-gnu.2.28" "$@" ;;
*) exec "$WHEEL_PYTHON" -m ziglang "$tool" "$@" ;;
esac
