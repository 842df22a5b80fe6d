"""HDF5 files as trees: written whole or not at all, read whole or refused with one line.

In memory a group is a dict.  A dict in it is a group, an array is a dataset, and anything else is
an attribute.  Arrays have units, and names and scales of their dimensions (`DESCRIBED`), which
HDF5, netCDF and xarray know; the scales are not read back.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import h5py
import ml_dtypes
import numpy as np

from a2d_mpi.core.atomic import check_writable, write_whole

# Schemas and their versions: a run of attention, many runs, a training, answers to prompts.
RESULT_SCHEMA = ("a2d_mpi result", 2)
BENCHMARK_SCHEMA = ("a2d_mpi benchmark", 2)
TRAINING_SCHEMA = ("a2d_mpi training", 3)
GENERATION_SCHEMA = ("a2d_mpi generation", 1)
# Arrays of fewer bytes would hardly shrink.  Larger ones are tensors and weights: their digits are
# random, and packing them would take a second for each 50 MB.
PACKED = range(128, 1 << 24)
# Units and dimensions of arrays, by the name of a dataset, or of a group (with /) around it.
DESCRIBED = {
    "timings/": ("s", "trial", "rank"),
    "traffic/": ("byte", "rank"),
    "blocks/": ("1", "rank"),
    "area": ("1", "rank"),
    "out": ("1", "token", "head", "element_v"),
    "lse": ("1", "token", "head"),
    "dq": ("1", "token", "head", "element"),
    "dk": ("1", "token", "head_kv", "element"),
    "dv": ("1", "token", "head_kv", "element_v"),
    # Files of other programs: training (by step), generation (by prompt), kernels.
    "seconds/": ("s", "step"),
    "loss": ("1", "step"),
    "learning_rate": ("1", "step"),
    "grad_norm": ("1", "step"),
    "token_seconds": ("s", "token"),
    "cache": ("byte", "rank"),
    "sent": ("byte", "rank"),
    "figures/": ("s", "trial"),
}
# HDF5 2.0 calls this type H5T_FLOAT_BFLOAT16LE; older versions know it by its bits.  h5py reads it
# as float32.
_BFLOAT16 = h5py.h5t.IEEE_F32LE.copy()
_BFLOAT16.set_fields(15, 7, 8, 0, 7)  # sign, exponent and mantissa: first bits and widths
_BFLOAT16.set_ebias(127)
_BFLOAT16.set_precision(16)
_BFLOAT16.set_size(2)
# As what h5py takes these: netCDF has no flags, and h5py no bfloat16.
_TAKEN = {np.dtype(bool): np.dtype("i1"), np.dtype(ml_dtypes.bfloat16): np.dtype("f4")}


class Tree(dict):
    """A group of a file that was read: what it lacks is an OSError, an error of the file."""

    def __init__(self, group: h5py.Group) -> None:
        super().__init__(plain(group.attrs))
        self._path = group.file.filename

    def __missing__(self, name: str) -> None:
        raise OSError(f"cannot read {self._path} as HDF5: {name} is missing")


@contextmanager
def reading(path: str | os.PathLike[str], schema: tuple[str, int]) -> Iterator[h5py.File]:
    """Open a file of the given schema in a ``with`` statement; errors of h5py become one line.

    Raises
    ------
    OSError
        If the file cannot be read, also inside the ``with`` statement.
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
            if actual != schema:
                has = "neither" if actual == (None, None) else "{!r} and {!r}".format(*actual)
                raise ValueError(
                    f"{path}: the attributes schema and schema_version must be "
                    f"{schema[0]!r} and {schema[1]}, got {has}"
                )
            yield file
    except (OSError, RuntimeError) as error:  # h5py raises both
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise OSError(f"cannot read {path} as HDF5: {reason}") from error


def read_file(path: str | os.PathLike[str], schema: tuple[str, int]) -> Tree:
    """Read a whole file, without its schema.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the schema is wrong.
    """
    with reading(path, schema) as file:
        tree = load(file)
        del tree["schema"], tree["schema_version"]
        return tree


def load(group: h5py.Group) -> Tree:
    """Read everything in a group."""
    tree = Tree(group)
    for name, x in group.items():
        if isinstance(x, h5py.Group):
            tree[name] = load(x)
        elif not x.is_scale:
            tree[name] = x[()]
    return tree


def flat(tree: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Return all arrays of a tree by their paths."""
    arrays: dict[str, np.ndarray] = {}
    for name, x in tree.items():
        if isinstance(x, Mapping):
            arrays |= {f"{name}/{path}": y for path, y in flat(x).items()}
        elif isinstance(x, np.ndarray):
            arrays[name] = x
    return arrays


def write_file(path: str | os.PathLike[str], schema: tuple[str, int], tree: Mapping) -> None:
    """Write a new file; if writing fails, an existing file is left as it was.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...).
    """
    with new_file(path, schema) as file:
        fill(file, tree)


def fill(group: h5py.Group, tree: Mapping[str, object]) -> None:
    """Write a tree into a group; names of groups and arrays may be paths."""
    for name, x in tree.items():
        if isinstance(x, Mapping):
            fill(group.require_group(name), x)
        elif isinstance(x, np.ndarray):
            data = create(group, name, x.shape, x.dtype)
            data[...] = x.astype(_TAKEN.get(x.dtype, x.dtype), copy=False)
        else:
            group.attrs[name] = _attribute(x)


def create(group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype) -> h5py.Dataset:
    """Create a dataset with its unit, and the names and scales of its dimensions."""
    kind = h5py.Datatype(_BFLOAT16) if dtype == ml_dtypes.bfloat16 else _TAKEN.get(dtype, dtype)
    data = group.create_dataset(name, shape, kind, **_packing(shape, dtype))
    owner, unit, *names = _description(data.name)
    if unit:
        data.attrs["units"] = unit
    scales = group.file[owner]
    for axis, (n, label) in enumerate(zip(shape, names)):
        data.dims[axis].label = label
        if label not in scales:
            index = np.arange(n)
            options = _packing(index.shape, index.dtype)
            scales.create_dataset(label, data=index, **options).make_scale(label)
        if scales[label].shape == (n,):
            data.dims[axis].attach_scale(scales[label])
    return data


def _packing(shape: tuple[int, ...], dtype: np.dtype) -> dict[str, object]:
    packs = prod(shape) * dtype.itemsize in PACKED and not dtype.hasobject
    return {"chunks": shape, "compression": "gzip", "shuffle": True} if packs else {}


def _description(place: str) -> tuple[str, ...]:
    """Return the group for the scales of a dataset, its unit, and the names of its dimensions."""
    *groups, name = place.split("/")
    for depth, around in enumerate(groups):
        if f"{around}/" in DESCRIBED:
            return "/".join(groups[:depth]) or "/", *DESCRIBED[f"{around}/"]
    return "/".join(groups) or "/", *DESCRIBED.get(name, ("",))


def _attribute(value: object) -> object:
    """Return what HDF5 can hold as an attribute: paths become text, and text is escaped."""
    if isinstance(value, list):
        return [_attribute(x) for x in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bool, np.bool_)):  # netCDF has no flags
        return int(value)
    if isinstance(value, str):
        # A path may have bytes that are not UTF-8, and Open MPI's version ends with a NUL.
        value = value.encode(errors="backslashreplace").decode().replace("\0", "")
    return value


@contextmanager
def new_file(
    path: str | os.PathLike[str], schema: tuple[str, int] | None = None, extend: bool = False
) -> Iterator[h5py.File]:
    """Open a new HDF5 file; it appears under its name, complete, when the ``with`` statement ends.

    At first it has only its schema, or with `extend` the contents of the existing file.  It grows
    in memory, because HDF5 cannot close a file after a failed write, and may crash at exit.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...); an existing file is left as it was.
    """
    data = io.BytesIO()
    if extend:
        with open(path, "rb") as old:
            shutil.copyfileobj(old, data)
    # Formats before HDF5 1.8 limit an attribute to 64 KiB, too little for 4095 host names.  Those
    # before 1.10 have a B-tree of 2 KB for each packed array.  Since then the header of an array
    # has the place of its only chunk.
    with h5py.File(data, "r+" if extend else "w", libver=("v110", "v110")) as file:
        if schema and not extend:
            file.attrs.update({"schema": schema[0], "schema_version": schema[1]})
        yield file
    write_whole(path, data.getbuffer())


def extend_file(path: str | os.PathLike[str], schema: tuple[str, int], tree: Mapping) -> None:
    """Add what is in the groups of a tree to a file, or make the file.

    Members of the file's groups that have the same names are replaced.  If writing fails, nothing
    changes.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    with new_file(path, schema, extend=os.path.exists(path)) as file:
        for name, members in tree.items():
            for run in members.keys() & file.require_group(name).keys():
                del file[name][run]
        fill(file, tree)


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


def plain(attrs: h5py.AttributeManager) -> dict[str, object]:
    """Return attributes as Python's own types, also strings that other programs wrote."""
    values = {k: np.asarray(v).tolist() for k, v in attrs.items()}
    texts = {k: v.decode(errors="replace") for k, v in values.items() if isinstance(v, bytes)}
    return {**values, **texts}
