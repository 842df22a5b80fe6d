"""Standard output and error: nothing that is printed ends a program, errors are one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable

from tqdm import tqdm


class _Unread(io.FileIO):
    """A standard stream that somebody may cease to read, or whose disk is full: the rest goes
    nowhere, and `lost_output` tells of a full disk.
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
    """Tell, and say on stderr, if something that the program printed could not be written."""
    sys.stdout.flush()
    if _Unread.error is None:
        return False
    why = os.strerror(_Unread.error.errno)
    print(f"{prog}: error: cannot write to standard output: {why}", file=sys.stderr, flush=True)
    return True


def open_streams() -> None:
    """Let nothing that is printed end a program: no odd path, no `| head -1`, no `>&-`."""
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
    """One line for the user, with the name of the file if it is about one."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def progress(items: Iterable | None = None, rank: int = 0, **options: object) -> tqdm:
    """A progress bar on stderr: on the first rank, and only if stderr is a terminal."""
    return tqdm(items, disable=rank != 0 or None, leave=False, **options)
