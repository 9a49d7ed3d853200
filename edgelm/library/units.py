"""Numbers of bytes and seconds as people read them. Decimal units, as disks and the hub have them."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Return a number of bytes with three digits at most: 812 B, 4.92 GB."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "TB":
            break
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration: 42 s, 3:07 min, 1:20:05 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{left:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d} h"
