"""Bytes as people write and read them."""

import re

_UNITS = {"": 1, "B": 1} | {f"{prefix}iB": 1 << (10 * n) for n, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)}


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("24GiB"), parse_bytes("1.5 MB"), parse_bytes("512")
    (25769803776, 1500000, 512)

    Raises:
        ValueError: no positive number, or another unit than B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]) > 0:
        raise ValueError(f"{text!r} is no amount of memory: write it like 24GiB, with one of {', '.join(_UNITS)[4:]}")
    return int(float(found[1]) * _UNITS[found[2]])


def shown_bytes(size: int) -> str:
    """
    >>> shown_bytes(25769803776), shown_bytes(-1536), shown_bytes(0)
    ('24.0 GiB', '-1.5 KiB', '0 B')
    """
    amount, sign = float(abs(size)), "-" if size < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"
        amount /= 1024
    return f"{sign}{amount:.1f} TiB"
