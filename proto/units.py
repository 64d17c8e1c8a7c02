"""Sizes, durations and percentages as people write them: `8GiB`, `300s`, `1h30m`, `37.36 %`.

Sizes use binary units (KiB = 1024 B). `8G` and `8GB` are refused, because half of all tools mean
10^9 bytes by them and the other half 2^30.
"""

from __future__ import annotations

import re
from decimal import Decimal

_BYTE_UNITS = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "pib": 1 << 50,
}
_BYTE_NAMES = ("PiB", "TiB", "GiB", "MiB", "KiB")
_NS_UNITS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_NUMBER = r"\d+(?:\.\d+)?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})\s*(ns|us|ms|s|m|h|d)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """`8GiB`, `1.5 MiB`, `512B` or a bare number of bytes, as bytes, to the nearest byte.

    Case does not matter. Raises ValueError if the text is not a size, is negative, or has an
    ambiguous unit (`GB`, `G`).
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and B, KiB, MiB, GiB or TiB")
    number, unit = match.groups()
    scale = _BYTE_UNITS.get(unit.lower() or "b")
    if scale is None:
        raise ValueError(f"{text!r} has an unknown unit {unit!r}: use B, KiB, MiB, GiB or TiB")
    return round(Decimal(number) * scale)


def format_bytes(count: int) -> str:
    """A size in the largest binary unit that is not larger than it: `8GiB`, `1.5MiB`, `1000B`.

    It is exact, for `parse_bytes` too, if three decimals suffice. Otherwise it is rounded to two
    decimals: `1.21MiB`.
    """
    sign, count = ("-", -count) if count < 0 else ("", count)
    for name in _BYTE_NAMES:
        unit = _BYTE_UNITS[name.lower()]
        if count >= unit:
            thousandths, rest = divmod(count * 1000, unit)
            digits = f"{thousandths / 1000:.3f}" if not rest else f"{count / unit:.2f}"
            return f"{sign}{digits.rstrip('0').rstrip('.')}{name}"
    return f"{sign}{count}B"


def parse_duration_ns(text: str) -> int:
    """`300s`, `1h30m`, `2.5ms` (ns, us, ms, s, m, h, d; parts add up), as nanoseconds.

    Only 0 needs no unit. Raises ValueError if the text is not a duration or is negative.
    """
    rest = text.strip()
    if rest == "0":
        return 0
    total = Decimal(0)
    position = 0
    while match := _DURATION_PART.match(rest, position):
        total += Decimal(match[1]) * _NS_UNITS[match[2]]
        position = match.end()
    if not rest or position != len(rest):
        raise ValueError(f"{text!r} is not a duration: write a number and ns, us, ms, s, m, h or d")
    return round(total)


def format_duration(duration_ns: int) -> str:
    """A duration for people: `1h30m`, `2m5s`, `12.3ms`, `850ns`.

    It is rounded to whole seconds from a minute on, and to three decimals of its unit below. If
    nothing is rounded away, `parse_duration_ns` reads it back exactly.
    """
    sign, rest = ("-", -duration_ns) if duration_ns < 0 else ("", duration_ns)
    if rest >= _NS_UNITS["m"]:
        seconds = (rest + _NS_UNITS["s"] // 2) // _NS_UNITS["s"]
        parts = []
        for name, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
            count, seconds = divmod(seconds, length)
            if count:
                parts.append(f"{count}{name}")
        return sign + "".join(parts)
    for name in ("s", "ms", "us"):
        if rest >= _NS_UNITS[name]:
            digits = f"{rest / _NS_UNITS[name]:.3f}".rstrip("0").rstrip(".")
            return f"{sign}{digits}{name}"
    return f"{sign}{rest}ns" if rest else "0s"


def percent(share: float | None, decimals: int = 2) -> str:
    """A share as `37.36 %`; a dash for None, the share of an empty whole."""
    return "-" if share is None else f"{100 * share:.{decimals}f} %"
