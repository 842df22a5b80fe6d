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

# Errors of flock if another process holds the lock; some network file systems give EACCES.
_HELD = (errno.EAGAIN, errno.EACCES)


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


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return True if two paths name the same file, also by links and before the file exists."""
    with suppress(OSError):  # one of the files does not exist
        if os.path.samefile(one, other):
            return True
    return os.path.realpath(one) == os.path.realpath(other)


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
    _, temporary = _beside(target)
    try:
        if os.path.islink(target):  # realpath leaves only a circle of links unresolved
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
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


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file; if writing fails, an existing file is left as it was.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...).
    """
    with replacing(path) as (target, temporary):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give a temporary folder that appears under its name, with its files, when the context ends.

    Nothing of that name may be there.

    Raises
    ------
    OSError
        In place of every error, also of a library that writes the files.
    """
    folder, temporary = _beside(os.path.realpath(path))
    try:
        os.mkdir(temporary)
        yield temporary
        for inside, _, files in os.walk(temporary):
            for name in (*files, ""):
                _sync(os.path.join(inside, name))
        os.rename(temporary, path)
        _sync(folder)
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OSError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder; whoever is killed meanwhile, it is whole or not there.

    Raises
    ------
    OSError
        If it cannot be removed.
    """
    _, temporary = _beside(os.path.realpath(path))
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _beside(target: str) -> tuple[str, str]:
    """Return the folder of a file, and the path of a temporary file in it.

    Every job has its own name, also among jobs on different hosts.
    """
    folder, name = os.path.split(target)
    return folder, os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sync(path: str) -> None:
    """Let the disk have a file or folder before anything that comes later."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other jobs from writing a file, or the files of a folder, until the context ends.

    Temporary files that killed jobs have left there are removed.  The lock is a kernel lock
    (flock), which NFS also shares between hosts.  The locked file says which job holds the lock.
    A job that is killed leaves this file behind, but not the lock.  If the file system has no
    locks, no job is kept from writing, and temporary files stay.

    Raises
    ------
    OSError
        If another job holds the lock (the message names its host and PID), or if no lock file can
        be made.
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
            # Remove the name before the lock: the job that gets the lock next looks for the name.
            os.unlink(lock)
        os.close(file)


def _locked(path: str) -> tuple[int, bool]:
    """Lock a file; return it open, and True if its file system has locks."""
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
                try:
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"PID {os.getpid()} on {socket.gethostname()}".encode(), 0)
                except OSError:  # the disk is full
                    os.unlink(path)
                    os.close(file)
                    raise
                return file, works
        os.close(file)  # the previous job has just removed this file


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove temporary files and folders of a file, or of all files of a folder."""
    pattern = re.compile(rf"\.{re.escape(name) if name else '.+'}\.\d+(-[0-9a-f]+)?\.tmp")
    with suppress(OSError):
        for other in os.listdir(folder):
            if pattern.fullmatch(other):
                path = os.path.join(folder, other)
                (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
