"""Folders that are written, and removed, whole or not at all, as files are by `core.atomic`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from a2d_mpi.core.atomic import beside, sync


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give a temporary folder that appears under its name, with its files, when the context ends.

    Nothing of that name may be there.

    Raises
    ------
    OSError
        In place of every error, also of a library that writes the files.
    """
    folder, temporary = beside(os.path.realpath(path))
    try:
        os.mkdir(temporary)
        yield temporary
        for inside, _, files in os.walk(temporary):
            for name in (*files, ""):
                sync(os.path.join(inside, name))
        os.rename(temporary, path)
        sync(folder)
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
    _, temporary = beside(os.path.realpath(path))
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)
