"""Files that are written whole or not at all.

Functions raise OSError with one line for the user, which names the file and the reason.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def check_writable(
    path: str | os.PathLike[str],
    nbytes: int = 0,
    read: Callable[[str | os.PathLike[str]], object] | None = None,
) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    The file itself is not touched.

    Parameters
    ----------
    path : path
    nbytes : int
        Size that the file will have.
    read : callable, optional
        Function that raises OSError or ValueError for a file that may not be replaced.  Default:
        any file may be replaced.  An empty file may always be replaced.

    Raises
    ------
    OSError
        If the file cannot be written.  A quota is noticed only when it is exceeded.
    ValueError
        If the file exists and `read` refuses it.
    """
    with replacing(path) as (target, temporary):
        with open(temporary, "wb") as file:
            # A sparse file takes no space, but fails if it exceeds the largest size allowed.
            file.truncate(nbytes)
        free = shutil.disk_usage(os.path.dirname(target)).free
        if free < nbytes:
            raise OSError(f"the file needs {nbytes} bytes, but {free} bytes are free")
    if read is not None and os.path.exists(path) and os.path.getsize(path):
        try:
            read(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"will not replace {path}, another kind of file: {error}") from error


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file; refuse pipes and terminals, on which the program would wait.

    Raises
    ------
    OSError
        If the file cannot be read, or is not a regular file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        return file.read()


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Give the real path of a file, and the path of a temporary file beside it.

    The temporary file is removed when the context ends.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    target = os.path.realpath(path)  # a link stays a link, and its target is replaced
    _, temporary = beside(target)
    try:
        if os.path.exists(target):
            if not os.path.isfile(target):
                raise OSError("it is not a regular file")
            open(target, "r+b").close()  # a read-only file must not be replaced either
        yield target, temporary
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_whole(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a file; if writing fails, an existing file is left as it was.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...).
    """
    with replacing(path) as (target, temporary):
        with open(temporary, "wb") as file:
            file.write(data)
        sync(temporary)
        os.replace(temporary, target)


def beside(target: str) -> tuple[str, str]:
    """Return the folder of a file, and the path of a temporary file in it.

    Every job has its own name, also among jobs on different hosts.
    """
    folder, name = os.path.split(target)
    return folder, os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync(path: str) -> None:
    """Let the disk have a file or folder before anything that comes later."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
