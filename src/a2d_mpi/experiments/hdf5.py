"""Reading of HDF5 files: complete, or refused with one line.

HDF5 reads missing numbers as zeros, for example after a job was killed while it wrote.
"""

from __future__ import annotations

import os
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
    """Open a file of the given schema in a ``with`` statement; errors of h5py become one line.

    Without `needs_schema` a file without a schema is accepted, too: people write these by hand.

    Raises
    ------
    OSError
        If the file cannot be read, or the ``with`` statement raises OSError (as `member` does),
        KeyError, RuntimeError or TypeError.
    ValueError
        If the schema is wrong.
    """
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise OSError("it is not a regular file")  # h5py would wait for a pipe
        # No lock: files are replaced, not changed, and some parallel file systems have no locks.
        with h5py.File(path, "r", locking=False) as file:
            root = plain(file.attrs)
            actual = (root.get("schema"), root.get("schema_version"))
            if actual != schema and (needs_schema or actual != (None, None)):
                has = "neither" if actual == (None, None) else "{!r} and {!r}".format(*actual)
                raise ValueError(
                    f"{path}: the attributes schema and schema_version must be "
                    f"{schema[0]!r} and {schema[1]}, got {has}"
                )
            yield file
    except (OSError, KeyError, RuntimeError, TypeError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise OSError(f"cannot read {path} as HDF5: {reason}") from error


def check_output(
    path: str | os.PathLike[str] | None,
    schema: tuple[str, int],
    resume: bool | None = None,
    nbytes: int = 1 << 16,
) -> bool:
    """Check before the work that a file can be written afterwards.

    Parameters
    ----------
    path : path or None
        None: there is nothing to write.
    schema : (str, int)
    resume : bool, optional
        Whether the file may exist, which the caller then reads.  Default: a file of this schema
        may exist.
    nbytes : int
        Size that the file may have.

    Returns
    -------
    bool
        Whether the file exists.

    Raises
    ------
    OSError
        If it cannot be written.
    ValueError
        If it exists and `resume` is false, or another program made it.
    """
    if path is None:
        return False

    def read(path: str | os.PathLike[str]) -> None:
        with reading(path, schema):
            pass

    there = os.path.exists(path)
    check_writable(path, nbytes, read if resume is None else None)
    if there and resume is False:
        raise ValueError(f"{path} exists: give --resume to add to it, or another --output")
    return there


def member(group: h5py.Group, path: str) -> h5py.Group | h5py.Dataset | None:
    """Return the object under a path, or None; OSError if numbers of the dataset are missing."""
    item = group.get(path)
    if isinstance(item, h5py.Dataset):
        _check_complete(item, path)
    return item


def needed(group: h5py.Group, path: str, kind: type = h5py.Group) -> h5py.Group | h5py.Dataset:
    """Return the `member` of a group; OSError if there is none, or it is of another kind."""
    item = member(group, path)
    if not isinstance(item, kind):
        raise OSError(f"{kind.__name__.lower()} {path} is missing")
    return item


def arrays(group: h5py.Group | None) -> dict[str, np.ndarray]:
    """Read all datasets below a group, by their paths in it; an empty dict for None."""
    datasets: dict[str, np.ndarray] = {}
    if group is None:
        return datasets
    if not isinstance(group, h5py.Group):
        raise OSError(f"{group.name} must be a group")

    def add(name: str, x: h5py.Group | h5py.Dataset) -> None:
        if isinstance(x, h5py.Dataset):
            _check_complete(x, name)
            datasets[name] = x[()]

    group.visititems(add)
    return datasets


def plain(attrs: h5py.AttributeManager) -> dict[str, object]:
    """Return attributes as Python's own types, also strings that other programs wrote."""
    values = {k: np.asarray(v).tolist() for k, v in attrs.items()}
    texts = {k: v.decode(errors="replace") for k, v in values.items() if isinstance(v, bytes)}
    return {**values, **texts}


def _check_complete(data: h5py.Dataset, name: str) -> None:
    """Raise OSError unless all numbers of a dataset are in its file."""
    if data.shape is not None and 0 not in data.shape and not (data.external or data.is_virtual):
        if data.chunks:
            needed = prod(-(-n // size) for n, size in zip(data.shape, data.chunks))
            held, unit = data.id.get_num_chunks(), "chunks"
        else:
            needed = prod(data.shape) * data.id.get_type().get_size()
            held, unit = data.id.get_storage_size(), "bytes"
        if held < needed:
            raise OSError(f"{name} has {held} of the {needed} {unit} of its shape {data.shape}")
