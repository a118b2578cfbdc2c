"""Writes sizes, durations, counts and names for people, and reads sizes and durations from them."""

from __future__ import annotations

import re

from lazyckpt.errors import ConfigError

_SIZES = {"": 1} | {
    f"{prefix}{i}": (1024 if i else 1000) ** power for power, prefix in enumerate("kmgtp", 1) for i in ("", "i")
}
_TIMES = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def size(nbytes: float) -> str:
    """Three digits and a binary unit: 512 B, 38.6 MiB, 1.21 GiB."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        nbytes /= 1024
        if nbytes < 999.5 or unit == "PiB":
            break
    return f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"


def duration(seconds: float) -> str:
    """Three digits and a unit: 0.42 ms, 35.7 ms, 1.5 s, 20 min."""
    for unit, length, limit in (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def count(number: int, noun: str, plural: str = "") -> str:
    """1 record, 2 records."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def plain(text: object) -> str:
    """Escapes terminal sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def parse_size(text: str) -> float:
    """Bytes of 5GB, 512 MiB or 1.2GB/s; GB is 10⁹ bytes, GiB 2³⁰. Raises ConfigError."""
    return _parse(text, _SIZES, "b", "a size such as 3.5GB or 512MiB")


def parse_duration(text: str) -> float:
    """Seconds of 800ms, 1.5s, 20min, 12h or 30d. Raises ConfigError."""
    return _parse(text, _TIMES, "", "a time such as 800ms, 1.5s, 20min, 12h or 30d")


def _parse(text: str, units: dict[str, float], suffix: str, expected: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    unit = units.get(match[2].removesuffix(suffix)) if match else None
    if match is None or unit is None or (value := float(match[1]) * unit) == float("inf"):
        raise ConfigError(f"{text!r}: expected {expected}")
    return value
