"""Amounts as people read them."""

from __future__ import annotations

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def readable_bytes(count: int) -> str:
    """Return a number of bytes in its largest unit, such as ``1.5 GiB``."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
