"""HDF5 files that may be a stranger's: whole, or refused in one line.

In HDF5 a link may lead to any file of this machine, numbers may lie in other files, and those that
lie nowhere are read as zeros.  Nothing of that may pass for what the file itself holds.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
            found = (root.get("schema"), root.get("schema_version"))
            if found != schema and (needs_schema or found != (None, None)):
                raise ValueError(f"{path} has schema, version {found}, must have {schema}")
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


def member(group: h5py.Group, path: str, virtual: bool = True) -> h5py.Group | h5py.Dataset | None:
    """The object that a group itself holds under a path; None if there is none.

    Parameters
    ----------
    group : Group
    path : str
    virtual : bool
        Whether a dataset may be made of others: of files in the folder of this one, all there.

    Raises
    ------
    OSError
        If the path leads out of the file, or not all numbers of the dataset are there.
    """
    found = group
    for name in path.encode().strip(b"/").split(b"/"):
        # Unlike `name in found`, this does not look at the file behind an external link.
        if not isinstance(found, h5py.Group) or not found.id.links.exists(name):
            return None
        if found.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            raise OSError(f"{path} is a link to another place, which is not followed")
        found = found[name]
    if isinstance(found, h5py.Dataset):
        _check_whole(found, path, virtual)
    return found


def needed(group: h5py.Group, path: str, kind: type = h5py.Group) -> h5py.Group | h5py.Dataset:
    """`member`, but OSError if there is none of that kind."""
    found = member(group, path)
    if not isinstance(found, kind):
        raise OSError(f"it has no {kind.__name__.lower()} {path}")
    return found


def arrays(group: h5py.Group | None) -> dict[str, np.ndarray]:
    """All datasets below a group, by their paths in it; of no group none."""
    found: dict[str, np.ndarray] = {}
    if group is None:
        return found
    if not isinstance(group, h5py.Group):
        raise OSError(f"{group.name} is no group")

    def add(name: str, x: h5py.Group | h5py.Dataset) -> None:
        if isinstance(x, h5py.Dataset):
            _check_whole(x, name, True)
            found[name] = x[()]

    group.visititems(add)
    return found


def plain(attrs: h5py.AttributeManager) -> dict[str, object]:
    """Attributes as Python's own types, also strings that no h5py has written."""
    values = {k: np.asarray(v).tolist() for k, v in attrs.items()}
    texts = {k: v.decode(errors="replace") for k, v in values.items() if isinstance(v, bytes)}
    return {**values, **texts}


def sources(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> list[str]:
    """Files that hold numbers of an HDF5 file, besides itself; none if it is no such file.

    `names`: of these datasets only.  Default: of all.
    """
    found: set[str] = set()

    def add(_: str, x: h5py.Group | h5py.Dataset) -> None:
        if isinstance(x, h5py.Dataset) and x.is_virtual:
            found.update(source.file_name for source in x.virtual_sources())

    with suppress(OSError, RuntimeError, KeyError, ValueError, TypeError), _opened(path) as file:
        if names is None:
            file.visititems(add)
        else:
            for name in names:
                add(name, member(file, name))
    folder = os.path.dirname(os.path.realpath(path))
    return sorted(os.path.join(folder, x) for x in found - {"."})


def _opened(path: str | os.PathLike[str]) -> h5py.File:
    """A file to read, if it is one: a pipe would be waited for, a device may do anything.

    Who can exchange the file between the two calls could as well keep this rank waiting otherwise.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # h5py has words for a folder
        raise OSError("it is not a regular file")
    # Nobody writes to it meanwhile, and not every parallel file system has locks.  By its real
    # path: sources of virtual datasets are then looked for in one folder only.
    return h5py.File(os.path.realpath(path), "r", locking=False)


def _check_whole(data: h5py.Dataset, name: str, virtual: bool) -> None:
    """OSError unless all numbers of a dataset are in its file, or in sources that are whole."""
    if data.external:
        raise OSError(f"the numbers of {name} are in other files (external storage)")
    if data.is_virtual:
        if not virtual:
            raise OSError(f"{name} is a virtual dataset itself")
        _check_sources(data, name)
    elif data.shape is not None and 0 not in data.shape:
        if data.chunks:
            needed = prod(-(-n // size) for n, size in zip(data.shape, data.chunks))
            held, unit = data.id.get_num_chunks(), "chunks"
        else:
            needed = prod(data.shape) * data.id.get_type().get_size()
            held, unit = data.id.get_storage_size(), "bytes"
        if held < needed:
            raise OSError(f"{name} has {held} of the {needed} {unit} of its shape {data.shape}")


def _check_sources(data: h5py.Dataset, name: str) -> None:
    """OSError unless the sources of a virtual dataset are there and make up all of it."""
    sources, shapes = data.virtual_sources(), []
    for _, path, source, _ in sources:
        inside = not os.path.isabs(path) and ".." not in path.split(os.sep)
        if not inside or "%" in path + source:  # %b stands for as many files as there are
            raise OSError(f"{name} is virtual, made of {source} in {path}: must be in this folder")
        full = data.file.filename
        if path != ".":
            full = os.path.join(os.path.dirname(full), path)
        try:
            with _opened(full) as file:
                found = member(file, source, virtual=False)
                shapes.append(found.shape)
        except (OSError, AttributeError) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number else error
            raise OSError(
                f"{name} is virtual, made of {source} in {path}, which cannot be read: {reason}"
            ) from error
    if data.shape != data.maxshape:  # only now: to know them, HDF5 opens the sources
        raise OSError(f"{name} is virtual and grows with its sources")
    covered = data.id.get_space()
    covered.select_none()
    for (target, path, source, chosen), shape in zip(sources, shapes):
        whole = chosen.get_select_type() == h5py.h5s.SEL_ALL
        n = prod(shape) if whole else chosen.get_select_npoints()
        ends = () if whole else chosen.get_select_bounds()[1]
        if n != target.get_select_npoints() or any(x >= y for x, y in zip(ends, shape)):
            raise OSError(f"{name} is virtual, needs more of {source} in {path} than its {shape}")
        kind = target.get_select_type()
        if kind == h5py.h5s.SEL_ALL:
            covered.select_all()
        elif kind == h5py.h5s.SEL_HYPERSLABS and target.is_regular_hyperslab():
            start, stride, count, block = target.get_regular_hyperslab()
            covered.select_hyperslab(start, count, stride, block, h5py.h5s.SELECT_OR)
        else:
            raise OSError(f"{name} is virtual, and {source} in {path} is scattered over it")
    held = covered.get_select_npoints()
    if held < prod(data.shape):
        raise OSError(f"{name} is virtual, its sources are {held} of {prod(data.shape)} numbers")
