"""HDF5 files that may be a stranger's: whole, or refused in one line.

In HDF5 a link may lead to any file of this machine, numbers may lie in other files, and those that
lie nowhere are read as zeros.  Nothing of that may pass for what the file itself holds.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import h5py
import numpy as np

from a2d_mpi.core.atomic import check_writable


@contextmanager
def reading(
    path: str | os.PathLike[str], schema: tuple[str, int], needs_schema: bool = True
) -> Iterator[h5py.File]:
    """An open file of the given schema; whatever h5py raises for a bad one becomes one line.

    Without `needs_schema` also one of no schema, which people write by hand.

    Raises
    ------
    OSError
        If it cannot be read, or the block raises OSError (as `member` does), KeyError,
        RuntimeError or TypeError.
    ValueError
        If the schema is another.
    """
    try:
        with _opened(path) as file:
            root = plain(file.attrs)
            actual = (root.get("schema"), root.get("schema_version"))
            if actual != schema and (needs_schema or actual != (None, None)):
                raise ValueError(f"{path} has schema, version {actual}, must have {schema}")
            yield file
    except (OSError, KeyError, RuntimeError, TypeError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise OSError(f"cannot read {path} as HDF5: {reason}") from error


def check_output(path: str | os.PathLike[str], schema: tuple[str, int], nbytes: int = 0) -> None:
    """Check before the work that a file of `nbytes` can be written after it.

    Raises
    ------
    OSError
        If it cannot be written.
    ValueError
        If a file is there that is not of the schema: of another program, or of somebody's work.
    """

    def read(path: str | os.PathLike[str]) -> None:
        with reading(path, schema):
            pass

    check_writable(path, nbytes, read)


def member(group: h5py.Group, path: str) -> h5py.Group | h5py.Dataset | None:
    """The object that a group itself holds under a path; None if there is none.

    Raises
    ------
    OSError
        If the path leads out of the file, or not all numbers of the dataset are there.
    """
    item = group
    for name in path.encode().strip(b"/").split(b"/"):
        # Unlike `name in found`, this does not look at the file behind an external link.
        if not isinstance(item, h5py.Group) or not item.id.links.exists(name):
            return None
        if item.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            raise OSError(f"{path} is a link to another place, which is not followed")
        item = item[name]
    if isinstance(item, h5py.Dataset):
        _check_whole(item, path)
    return item


def needed(group: h5py.Group, path: str, kind: type = h5py.Group) -> h5py.Group | h5py.Dataset:
    """`member`, but OSError if there is none of that kind."""
    item = member(group, path)
    if not isinstance(item, kind):
        raise OSError(f"it has no {kind.__name__.lower()} {path}")
    return item


def arrays(group: h5py.Group | None) -> dict[str, np.ndarray]:
    """All datasets below a group, by their paths in it; of no group none."""
    datasets: dict[str, np.ndarray] = {}
    if group is None:
        return datasets
    if not isinstance(group, h5py.Group):
        raise OSError(f"{group.name} is no group")

    def add(name: str, x: h5py.Group | h5py.Dataset) -> None:
        if isinstance(x, h5py.Dataset):
            _check_whole(x, name)
            datasets[name] = x[()]

    group.visititems(add)
    return datasets


def plain(attrs: h5py.AttributeManager) -> dict[str, object]:
    """Attributes as Python's own types, also strings that no h5py has written."""
    values = {k: np.asarray(v).tolist() for k, v in attrs.items()}
    texts = {k: v.decode(errors="replace") for k, v in values.items() if isinstance(v, bytes)}
    return {**values, **texts}


def _opened(path: str | os.PathLike[str]) -> h5py.File:
    """A file to read, if it is one: a pipe would be waited for, a device may do anything.

    Who can exchange the file between the two calls could as well keep this rank waiting otherwise.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # h5py has words for a folder
        raise OSError("it is not a regular file")
    # Nobody writes to it meanwhile, and not every parallel file system has locks.
    return h5py.File(path, "r", locking=False)


def _check_whole(data: h5py.Dataset, name: str) -> None:
    """OSError unless all numbers of a dataset are in its file."""
    if data.external or data.is_virtual:
        kind = "external storage" if data.external else "a virtual dataset"
        raise OSError(f"the numbers of {name} are in other files ({kind})")
    if data.shape is not None and 0 not in data.shape:
        if data.chunks:
            needed = prod(-(-n // size) for n, size in zip(data.shape, data.chunks))
            held, unit = data.id.get_num_chunks(), "chunks"
        else:
            needed = prod(data.shape) * data.id.get_type().get_size()
            held, unit = data.id.get_storage_size(), "bytes"
        if held < needed:
            raise OSError(f"{name} has {held} of the {needed} {unit} of its shape {data.shape}")
