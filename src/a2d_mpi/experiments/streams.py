"""Standard output and error: printing never ends a program; tables, progress, errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Container, Iterable, Sequence

from tqdm import tqdm


class _Unread(io.FileIO):
    """A standard stream that swallows output when nobody reads it or the disk is full.

    `lost_output` reports a full disk.
    """

    error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                _Unread.error = error
            return len(data)


def lost_output(prog: str) -> bool:
    """Return whether output could not be written; if so, say it on stderr."""
    sys.stdout.flush()
    if _Unread.error is None:
        return False
    why = os.strerror(_Unread.error.errno)
    print(f"{prog}: error: cannot write to standard output: {why}", file=sys.stderr, flush=True)
    return True


def open_streams() -> None:
    """Make printing safe: odd paths, closed pipes (`| head -1`) and streams (`>&-`) do no harm."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            continue
        old.flush()
        raw = _Unread(old.fileno(), "w", closefd=False)
        new = io.TextIOWrapper(
            io.BufferedWriter(raw),
            old.encoding,
            "backslashreplace",  # paths need not be UTF-8
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, name, new)


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
