"""Standard output and error: tables, progress, errors."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence

from tqdm import tqdm


def open_streams() -> None:
    """Print paths that are not UTF-8 with escapes."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
        stream.reconfigure(errors="backslashreplace")


def reason(error: Exception) -> str:
    """Return an error as one line for the user, with the name of its file if it has one."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def progress(items: Iterable | None = None, rank: int = 0, **options: object) -> tqdm:
    """Show a progress bar on stderr of the first rank, and only if stderr is a terminal."""
    return tqdm(items, disable=rank != 0 or None, leave=False, **options)


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
