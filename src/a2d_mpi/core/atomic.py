"""Files that are written whole or not at all, by one job at a time.

Functions raise OSError with one line for the user, which names the file and the reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_HELD = (errno.EAGAIN, errno.EACCES)  # of a lock that somebody has; EACCES on some networks


def check_writable(
    path: str | os.PathLike[str],
    nbytes: int = 0,
    read: Callable[[str | os.PathLike[str]], object] | None = None,
) -> None:
    """Check before the work that a file of `nbytes` can be written after it.

    The file itself is not touched.

    Parameters
    ----------
    path : path
    nbytes : int
    read : callable, optional
        Raises OSError or ValueError for a file that may not be replaced.  Default: any may be.
        An empty one always may.

    Raises
    ------
    OSError
        If the file cannot be written.  A quota shows only when it is hit.
    ValueError
        If a file is there that `read` refuses.
    """
    with replacing(path) as (target, temporary):
        with open(temporary, "wb") as file:
            file.truncate(nbytes)  # takes no room, but fails beyond the largest file allowed
        free = shutil.disk_usage(os.path.dirname(target)).free
        if free < nbytes:
            raise OSError(f"it needs {nbytes} bytes, {free} are free")
    if read is not None and os.path.exists(path) and os.path.getsize(path):
        try:
            read(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is another kind of file, not replaced: {error}") from error


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


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Tell if two paths lead to the same file, by any link, or would if it was there."""
    with suppress(OSError):  # one of them is not there
        if os.path.samefile(one, other):
            return True
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Real path of a file, and of a temporary file beside it that is gone in the end."""
    target = os.path.realpath(path)  # so that a link stays one
    folder, name = os.path.split(target)
    # Another name for every job, on whatever host.
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
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


@contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other jobs from writing a file, or the files of a folder, until the block ends.

    Temporary files that killed jobs have left there are removed.  The lock is one of the kernel
    (flock; between the hosts of an NFS, too), on a file that says who has it: a job that is killed
    leaves this file, but not the lock.  Where there are no locks, nobody is kept from writing,
    and temporary files stay.

    Raises
    ------
    OSError
        If another job has it, with its host and PID, or no lock file can be made there.
    """
    target = os.path.realpath(path)
    folder, name = (target, "") if os.path.isdir(target) else os.path.split(target)
    lock = os.path.join(folder, f".{name}.lock" if name else ".lock")
    try:
        file, works = _locked(lock)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        if works:
            _remove_leftovers(folder, name)
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock)  # before the lock is let go of: whoever gets it looks for the name
        os.close(file)


def _locked(path: str) -> tuple[int, bool]:
    """An open lock file, and whether its file system has locks."""
    while True:
        file, works = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                who = os.pread(file, 1000, 0).decode(errors="replace") or "another job"
                os.close(file)
                raise OSError(f"{who} is writing it") from error
            works = False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                os.ftruncate(file, 0)
                os.pwrite(file, f"PID {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return file, works
        os.close(file)  # the job before has just removed it


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove temporary files of a file, or of all files of a folder."""
    pattern = re.compile(rf"\.{re.escape(name) if name else '.+'}\.\d+(-[0-9a-f]+)?\.tmp")
    with suppress(OSError):
        for other in os.listdir(folder):
            if pattern.fullmatch(other):
                os.unlink(os.path.join(folder, other))
