"""Numbers as people read them; sizes are decimal (1 MB = 10^6 bytes), as disks and file managers have them."""

from __future__ import annotations

_BYTE_UNITS = ("kB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = ("", "k", "M", "B", "T")


def bytes_text(num_bytes: float) -> str:
    """Write a size: 512 bytes, 1.4 MB, 28 GB."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    for unit in _BYTE_UNITS:
        num_bytes /= 1000
        if num_bytes < 999.5 or unit == _BYTE_UNITS[-1]:
            break
    return f"{_three_digits(num_bytes)} {unit}"


def count_text(count: float) -> str:
    """Write a large count: 960, 38.4k, 135M, 1.24B."""
    unit = ""
    for unit in _COUNT_UNITS:  # noqa: B007  the last unit is used after the loop
        if count < 999.5:
            break
        count /= 1000
    return f"{count:.0f}" if not unit else f"{_three_digits(count)}{unit}"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 step, 24 steps, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {_plural_of(noun)}"


def duration_text(seconds: float) -> str:
    """Write a length of time by its largest unit or two: 0.42 s, 17 s, 3 min 20 s, 2 h 5 min, 4 days."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else "0 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _pair(whole // 60, "min", whole % 60, "s")
    if whole < 48 * 3600:
        return _pair(whole // 3600, "h", whole % 3600 // 60, "min")
    return f"{whole // 86400} days"


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def _plural_of(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
