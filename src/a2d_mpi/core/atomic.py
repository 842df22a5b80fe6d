"""Files that are written whole or not at all.

Functions raise OSError with one line for the user, which names the file and the reason.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def check_writable(path: str | os.PathLike[str], nbytes: int = 0) -> None:
    """Check before the work that a file of `nbytes` can be written after it.

    The file itself is not touched.

    Raises
    ------
    OSError
        If the file cannot be written.  A quota shows only when it is hit.
    """
    with replacing(path) as (target, temporary):
        with open(temporary, "wb") as file:
            file.truncate(nbytes)  # takes no room, but fails beyond the largest file allowed
        free = shutil.disk_usage(os.path.dirname(target)).free
        if free < nbytes:
            raise OSError(f"it needs {nbytes} bytes, {free} are free")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read a file, but no pipe or terminal, which a program would wait for.

    Raises
    ------
    OSError
        If it cannot be read, or is not a regular file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        return file.read()


def refuse_same(output: str | os.PathLike[str], *inputs: str | os.PathLike[str] | None) -> None:
    """Check before the work that its output would not take the place of one of its inputs.

    Raises
    ------
    OSError
        If one of the inputs is the same file, by any path or link.
    """
    for path in filter(None, inputs):
        same = False
        with suppress(OSError):  # one of them is not there
            same = os.path.samefile(output, path)
        if same:
            raise OSError(f"cannot write {output}: it is the input {path}")


class Sink(io.FileIO):
    """A file on which no write fails, as HDF5 sees it; the first error is kept.

    HDF5 cannot close a file after a write that failed: it stays open, and the interpreter may
    crash at exit.  So after an error nothing more is written, and HDF5 does not learn of it.
    """

    error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        rest = memoryview(data)
        try:
            while rest and not self.error:  # one system call writes 2 GiB at most
                rest = rest[super().write(rest) :]
        except BaseException as error:  # nor may an interrupt pass through HDF5
            self.error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int | None:
        try:
            return size if self.error else super().truncate(size)
        except BaseException as error:
            self.error = error
        return size


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Real path of a file, and of a temporary file beside it that is gone in the end."""
    target = os.path.realpath(path)  # so that a link stays one
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        if os.path.islink(target):  # one that leads nowhere is resolved, too, but one to itself
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if os.path.exists(target):
            if not os.path.isfile(target):
                raise OSError("it is not a regular file")
            open(target, "r+b").close()  # a file that may not be written is not replaced either
        yield target, temporary
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove temporary files that killed processes have left beside a file.

    For files that have one writer at a time.
    """
    folder, name = os.path.split(os.path.realpath(path))
    with suppress(OSError):
        for other in os.listdir(folder):
            if re.fullmatch(rf"\.{re.escape(name)}\.\d+\.tmp", other):
                os.unlink(os.path.join(folder, other))
