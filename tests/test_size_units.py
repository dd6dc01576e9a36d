"""What ``kvferry.units`` prints: three digits, the unit that fits, and never a power of ten."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.units import format_bytes, format_rate, format_seconds, format_size

NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
FACTOR = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B = 0 b"),
        (999, "999 B = 7.99 kb"),
        (1000, "1 kB = 1000 B = 8 kb"),
        (999_499, "999 kB = 976 KiB = 8 Mb"),
        (999_936, "1 MB = 976 KiB = 8 Mb"),
        (1_023_999, "1.02 MB = 1,000 KiB = 8.19 Mb"),
        (1_342_177_280, "1.34 GB = 1.25 GiB = 10.7 Gb"),
        (10**15, "1,000 TB = 909 TiB = 8,000 Tb"),
    ],
)
def test_sizes_at_the_borders_of_units(nbytes: int, text: str) -> None:
    """A value that rounds up to the next unit is printed in that unit; beyond the last one all digits are."""
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.9996, "1 s"),
        (0.0125, "12.5 ms"),
        (0.000_999_96, "1 ms"),
        (999.9, "1,000 s"),
        (0.3e-9, "300 ps"),
        (0.9999e-9, "1 ns"),
        (4e-13, "0 s"),
        (88_888_888.8, "88,888,889 s"),
    ],
)
def test_seconds_at_the_borders_of_units(seconds: float, text: str) -> None:
    """Long times are whole seconds, not a power of ten."""
    assert format_seconds(seconds) == text


@given(st.integers(0, 10**18))
def test_a_printed_size_is_within_half_a_percent(nbytes: int) -> None:
    """What is printed can be read back, to three digits."""
    number, unit = format_bytes(nbytes).split(" (")[0].split()
    assert NUMBER.fullmatch(number)
    assert abs(float(number.replace(",", "")) * FACTOR[unit] - nbytes) <= 0.005 * nbytes


@given(st.floats(1e-12, 1e12))
def test_a_printed_time_is_within_half_a_percent(seconds: float) -> None:
    """The same for times."""
    number, unit = format_seconds(seconds).split()
    assert NUMBER.fullmatch(number)
    assert abs(float(number.replace(",", "")) * SECONDS[unit] - seconds) <= 0.005 * seconds
    assert "e" not in format_rate(1e9 * seconds)
