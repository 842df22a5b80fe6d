"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Format a table with two blanks between columns; columns not in `left` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
