"""Numbers as people read them, and aligned tables."""

from __future__ import annotations

from collections.abc import Sequence


def short(count: float) -> str:
    """A count with a decimal prefix.

    >>> short(950), short(409_600), short(1_250_000_000)
    ('950', '410 k', '1.25 G')
    """
    for unit in ("", " k", " M", " G"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.3g} T"


def times(ratio: float) -> str:
    """A ratio with three digits and an `x`.

    >>> times(2.734), times(50), times(2641.3)
    ('2.73 x', '50 x', '2,640 x')
    """
    return f"{float(f'{ratio:.3g}'):,.10g} x"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits.

    >>> duration(8.25), duration(340), duration(7500)
    ('8.2 s', '5 min 40 s', '2 h 05 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def table(rows: Sequence[Sequence[str]], left: int = 1, markdown: bool = False) -> str:
    """Columns of equal width; the first row is the head, `left` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    if not markdown:
        return "\n".join("  ".join(row).rstrip() for row in padded)
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join(["---", *["---:"] * (len(widths) - 1)]) + "|")
    return "\n".join(lines)
