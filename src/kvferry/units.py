"""Bytes, bits, seconds and rates: the only place that parses and prints them.

Two rules. Sizes are bytes and say both GB (10^9) and GiB (2^30), because the two differ by
7 %. Rates say both GB/s and Gb/s, because the two differ by 8 times and links are sold in bits.
"""

from __future__ import annotations

import math
import re

from kvferry.errors import InputError

__all__ = [
    "format_bits",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "format_size",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
]

_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_BITS = ((10**12, "Tb"), (10**9, "Gb"), (10**6, "Mb"), (10**3, "kb"))
_BYTE_UNITS = {"": 1, "B": 1, **{name: n for n, name in _DECIMAL + _BINARY}, "KB": 10**3}
_RATE_UNITS = {
    **{f"{name}/s": float(n) for name, n in _BYTE_UNITS.items() if name},
    **{f"{name}/s": n / 8 for n, name in _BITS},
}
_PARTS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_SECOND_UNITS = _PARTS | {"min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ]*(?:/s)?)\s*")


def _scaled(value: float, table: tuple[tuple[int, str], ...], unit: str) -> str:
    for factor, name in table:
        if abs(_rounded(value / factor)) >= 1:
            return f"{_three_digits(value / factor)} {name}"
    is_fraction = isinstance(value, float) and not value.is_integer()
    return f"{_three_digits(value) if is_fraction else int(value)} {unit}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _three_digits(value: float) -> str:
    """Three significant digits, never as a power of ten: 999.6 is ``1,000`` and not ``1e+03``."""
    return f"{value:.3g}" if abs(_rounded(value)) < 1000 else f"{value:,.0f}"


def format_bytes(nbytes: int) -> str:
    """``1342177280`` -> ``"1.34 GB (1.25 GiB)"``; below 1 kB only the count."""
    decimal = _scaled(nbytes, _DECIMAL, "B")
    return decimal if abs(nbytes) < 1000 else f"{decimal} ({_scaled(nbytes, _BINARY, 'B')})"


def format_bits(nbytes: int) -> str:
    """The same bytes counted in bits: ``1342177280`` bytes -> ``"10.7 Gb"``."""
    return _scaled(8 * nbytes, _BITS, "b")


def format_size(nbytes: int) -> str:
    """One size in all three counts: ``1342177280`` -> ``"1.34 GB = 1.25 GiB = 10.7 Gb"``."""
    if nbytes < 1000:
        return f"{nbytes} B = {format_bits(nbytes)}"
    return f"{_scaled(nbytes, _DECIMAL, 'B')} = {_scaled(nbytes, _BINARY, 'B')} = {format_bits(nbytes)}"


def format_rate(bytes_per_second: float, *, round_up: bool = False) -> str:
    """``5e10`` -> ``"50 GB/s (400 Gb/s)"``; ``round_up``: a bound, neither of the two below it."""
    shown = [bytes_per_second, 8 * bytes_per_second]
    if round_up:
        shown = [_up(value) for value in shown]
    return f"{_scaled(shown[0], _DECIMAL, 'B')}/s ({_scaled(shown[1], _BITS, 'b')}/s)"


def _up(value: float) -> float:
    """The next number up with three significant digits."""
    if value <= 0:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / step - 1e-9) * step


def format_seconds(seconds: float) -> str:
    """Three significant digits in the unit that fits, and whole seconds from 1,000 s: ``"12.5 ms"``.

    Less than a picosecond is no time: a fit has such a term where rounding left one.
    """
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps")):
        if abs(_rounded(seconds / factor)) >= 1:
            return f"{_three_digits(seconds / factor)} {name}"
    return "0 s"


def _parse(text: str, field: str, units: dict[str, int] | dict[str, float]) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        known = ", ".join(name for name in units if name)
        raise InputError(f"{field}: {text!r} is not a number with one of the units {known}")
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise InputError(f"{field}: {text!r} is too large")
    return value


def parse_bytes(text: str, field: str = "bytes") -> int:
    """``"64 KiB"``, ``"1.5GB"``, ``"4096"`` -> bytes. Raises InputError naming ``field``."""
    return round(_parse(text, field, _BYTE_UNITS))


def parse_seconds(text: str, field: str = "seconds") -> float:
    """``"200ms"``, ``"0.08"``, ``"2 min"`` -> seconds. Raises InputError naming ``field``."""
    return _parse(text, field, _SECOND_UNITS)


def parse_rate(text: str, field: str = "rate") -> float:
    """``"50 GB/s"``, ``"400 Gb/s"`` -> bytes a second, never without a unit; InputError names ``field``."""
    return _parse(text, field, _RATE_UNITS)
