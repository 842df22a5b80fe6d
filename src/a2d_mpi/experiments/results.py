"""The input file and the result file of a run, both HDF5.

Every function raises OSError if a file cannot be read or written, and ValueError if its contents
are wrong.  The message is one line that names the file, for the user to read.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import h5py
import numpy as np

from a2d_mpi.core.atomic import read_regular, replacing
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.experiments.hdf5 import arrays, member, needed, plain, reading
from a2d_mpi.sharding.distribution import Distribution

INPUT_SCHEMA = ("a2d_mpi input", 1)
RESULT_SCHEMA = ("a2d_mpi result", 1)
# A span of time of a rank: `part` is an index into TIMED_PARTS, `start` and `end` are seconds
# since the phase began on this rank.
SPAN = np.dtype([("rank", "i4"), ("part", "i4"), ("start", "f4"), ("end", "f4")])
TIMED_PARTS = ("compute", "merge", "wait", "total")  # as of `AttentionPlan.timings`
# Units and names of axes of arrays.
UNITS = {
    "timings": ("s", ("trial", "rank")),
    "traffic": ("byte", ("rank",)),
    "area": ("(query, key) pair", ("rank",)),
}
SMALLER = {"compression": "gzip", "shuffle": True}


@dataclass(frozen=True)
class InputInfo:
    """The contents of an input file: q, k, v and perhaps dout, the gradient with respect to out.

    Attributes
    ----------
    path : str
    config : AttentionConfig
        Sizes of the tensors.
    has_dout : bool
        Whether the file has dout.
    """

    path: str
    config: AttentionConfig
    has_dout: bool


def inspect_input(path: str | os.PathLike[str]) -> InputInfo:
    """Check everything of an input file except its numbers, which are not read.

    Raises
    ------
    OSError
        If the file is missing, unreadable, not HDF5 or cut short.
    ValueError
        If the schema is wrong, or a dataset is missing or has a wrong type or shape.
    """
    with reading(path, INPUT_SCHEMA) as file:
        names = ["q", "k", "v"] + ["dout"] * (member(file, "dout") is not None)
        datasets = {name: needed(file, name, h5py.Dataset) for name in names}
        shapes = {name: x.shape or () for name, x in datasets.items()}
        dtypes = {name: x.dtype for name, x in datasets.items()}
    for name in names:
        if dtypes[name].kind != "f":
            raise ValueError(f"{path}: {name} must be floating-point numbers, got {dtypes[name]}")
        if len(shapes[name]) != 3:
            raise ValueError(
                f"{path}: {name} must have shape (seqlen, heads, headdim), got {shapes[name]}"
            )
    seqlen, nheads, headdim = shapes["q"]
    try:
        config = AttentionConfig(seqlen, nheads, headdim, shapes["k"][1], headdim_v=shapes["v"][2])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if any(shapes[name] != (seqlen, *config.shape(name)) for name in names):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{path}: shapes do not agree: {listed}")
    return InputInfo(os.fspath(path), config, "dout" in names)


def read_shard(
    info: InputInfo, name: str, distribution: Distribution, rank: int, dtype: np.typing.DTypeLike
) -> np.ndarray:
    """Read the rows of one shard of the sequence.  Many processes may read at the same time.

    Parameters
    ----------
    info : InputInfo
        Result of `inspect_input`.
    name : {"q", "k", "v", "dout"}
    distribution : Distribution
        Owners of the first ``distribution.seqlen`` tokens of the file.
    rank : int
    dtype : dtype
        Dtype of the result.

    Returns
    -------
    (n, heads, headdim) dtype
        A new array; row i is the token ``distribution.tokens(rank)[i]``.

    Raises
    ------
    OSError
        If this rank cannot read the file, or its numbers are damaged.
    ValueError
        If the file has too few tokens.
    """
    rows = np.empty((distribution.count(rank), *info.config.shape(name)), dtype)
    with reading(info.path, INPUT_SCHEMA) as file:
        data = needed(file, name, h5py.Dataset)
        if len(data) < distribution.seqlen:
            raise ValueError(
                f"{info.path} has {len(data)} tokens, must have {distribution.seqlen}"
            )
        for here, there in distribution.slices(rank):
            rows[here] = data[there]
    return rows


@dataclass(frozen=True)
class Check:
    """The check of one tensor.

    Attributes
    ----------
    error : float
        Largest error.  With a narrow format on the wire, the largest distance from attention of
        the rounded tensors.
    bound : float
        Largest allowed error; NaN if rounding alone may change the values by a tenth.
    rows : int
        Number of compared tokens.
    as_given : float or None
        With a narrow format on the wire, the largest distance from attention of the tensors before
        rounding.
    """

    error: float
    bound: float
    rows: int
    as_given: float | None = None

    @property
    def attributes(self) -> dict[str, object]:
        """The fields without None, and the verdict: attributes in result files."""
        values = {name: x for name, x in vars(self).items() if x is not None}
        return {**values, "passed": self.passed}

    @property
    def passed(self) -> bool:
        """True if tokens were compared, and the error is at most the bound."""
        return self.verdict == "passed"

    @property
    def verdict(self) -> str:
        """The verdict in words: "passed", or "FAILED" with the reason if it is not the error."""
        if self.rows <= 0:
            return "FAILED: nothing was compared"
        if not math.isfinite(self.error):
            return "FAILED: not finite"
        if not math.isfinite(self.bound):
            return "FAILED: not checked, rounding alone may change a tenth of it"
        return "passed" if self.error <= self.bound else "FAILED"


@dataclass(eq=False)
class Result:
    """Everything that one run has measured.

    Attributes
    ----------
    provenance : dict
        Result of `a2d_mpi.experiments.origin.provenance`.
    config : dict of str to bool, int, float or str
        method, rows, cols, mask, seqlen, ...
    area : (rank,) int64
        Visible (query, key) pairs.
    timings : dict of str to (trial, rank) float64
        Seconds; keys as in `AttentionPlan.timings`: "forward/compute", ...
    traffic : dict of str to dict of str to (rank,) int64
        Bytes per call: ``traffic["forward/row"]["sent"]``, "received", "predicted_sent",
        "predicted_received".
    checks : dict of str to Check
        Checks by tensor: "out", "lse", "dq", ...
    outputs : dict of str to arrays (seqlen, ...)
        Gathered tensors in the order of the sequence, if they are to be kept.
    predicted : dict of str to (rank,) float64
        Predicted seconds by "phase/part" as in `timings`; the parts are "compute", "merge",
        "wait", "other" and "total".
    figures : dict of str to number or str
        Other predictions: bytes of memory, lower bounds, ...
    spans : dict of str to (n,) SPAN
        Spans of all ranks in one trial, by phase.
    """

    provenance: dict[str, object]
    config: dict[str, object]
    area: np.ndarray
    timings: dict[str, np.ndarray]
    traffic: dict[str, dict[str, np.ndarray]]
    checks: dict[str, Check]
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    predicted: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, object] = field(default_factory=dict)
    spans: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(check.passed for check in self.checks.values())


def phases_of(result: Result) -> tuple[str, ...]:
    """Return the phases that were timed."""
    return ("forward", "backward") if result.config["backward"] else ("forward",)


def usual_trial(total: np.ndarray) -> int:
    """Return the trial of `total`, (trial, rank), whose slowest rank took the (lower) median."""
    slowest = total.max(axis=1)
    return int(np.argsort(slowest, kind="stable")[(len(slowest) - 1) // 2])


@contextmanager
def new_file(
    path: str | os.PathLike[str], schema: tuple[str, int] | None = None, extend: bool = False
) -> Iterator[h5py.File]:
    """Open a new HDF5 file; it appears under its name, complete, when the ``with`` statement ends.

    At first it has only its schema, or with `extend` the contents of the existing file.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...); an existing file is left as it was.
    """
    with replacing(path) as (target, temporary):
        # In memory, because HDF5 cannot close a file after a failed write and may crash at exit.
        memory = io.BytesIO(read_regular(target) if extend else b"")
        # Formats before HDF5 1.8 limit an attribute to 64 KiB, too little for 4095 host names.
        with h5py.File(memory, "r+" if extend else "w", libver="v108") as file:
            if schema and not extend:
                set_attributes(file, {"schema": schema[0], "schema_version": schema[1]})
            yield file
        with open(temporary, "wb") as output:
            output.write(memory.getbuffer())
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, target)


def write_result(path: str | os.PathLike[str], result: Result) -> None:
    """Write a result file.  If writing fails, an existing file is left as it was.

    Raises
    ------
    OSError
        If it cannot be written (no room, ...).
    """
    with new_file(path, RESULT_SCHEMA) as file:
        fill(file, result)


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read a file of `write_result`, including the outputs.

    Raises
    ------
    OSError
        If the file cannot be read, or lacks something.
    ValueError
        If the schema is wrong.
    """
    with reading(path, RESULT_SCHEMA) as file:
        return load(file)


def fill(group: h5py.Group, result: Result) -> None:
    """Write a result into an empty group."""
    set_attributes(group, result.provenance)
    set_attributes(group.create_group("config"), result.config)
    group["area"] = np.asarray(result.area, np.int64)
    timings, traffic, outputs = map(group.create_group, ("timings", "traffic", "outputs"))
    for name, (unit, axes) in UNITS.items():
        set_attributes(group[name], {"unit": unit, "axes": axes, "ranks": len(result.area)})
    for name, seconds in result.timings.items():
        timings[name] = np.asarray(seconds, np.float64)
        timings[name].attrs["unit"] = "s"
    for name, counts in result.traffic.items():
        for what, nbytes in counts.items():
            traffic[f"{name}/{what}"] = np.asarray(nbytes, np.int64)
    write_checks(group, result.checks)
    for name, x in result.outputs.items():
        # HDF5 has no bfloat16; float32 holds its numbers as they are.
        outputs[name] = x if x.dtype.kind == "f" else x.astype(np.float32)
    if result.predicted or result.figures:
        predicted = group.create_group("predicted")
        set_attributes(predicted, result.figures)
        for name, seconds in result.predicted.items():
            predicted[name] = np.asarray(seconds, np.float64)
            predicted[name].attrs["unit"] = "s"
    for phase, spans in result.spans.items():
        # Compressed, because spans are most of a benchmark's file.
        group.create_dataset(f"spans/{phase}", data=spans, **SMALLER if len(spans) else {})
        group[f"spans/{phase}"].attrs.update({"unit": "s", "parts": TIMED_PARTS})


def write_checks(group: h5py.Group, checks: Mapping[str, Check]) -> None:
    """Write checks into the subgroup "checks" of a group."""
    group = group.create_group("checks")
    for name, check in checks.items():
        set_attributes(group.create_group(name), check.attributes)


def load(group: h5py.Group) -> Result:
    """Read the result that `fill` wrote into a group or file."""
    root = plain(group.attrs)
    names = needed(group, "checks")
    checks = {name: plain(needed(group, f"checks/{name}").attrs) for name in names}
    traffic: dict[str, dict[str, np.ndarray]] = {}
    for name, nbytes in arrays(needed(group, "traffic")).items():
        key, _, what = name.rpartition("/")
        traffic.setdefault(key, {})[what] = nbytes
    predicted = member(group, "predicted")
    return Result(
        provenance={k: v for k, v in root.items() if not k.startswith("schema")},
        config=plain(needed(group, "config").attrs),
        area=needed(group, "area", h5py.Dataset)[()],
        timings=arrays(needed(group, "timings")),
        traffic=traffic,
        checks={
            k: Check(c["error"], c["bound"], c["rows"], c.get("as_given"))
            for k, c in checks.items()
        },
        outputs=arrays(needed(group, "outputs")),
        predicted=arrays(predicted),
        figures={} if predicted is None else plain(predicted.attrs),
        spans=arrays(member(group, "spans")),
    )


def set_attributes(group: h5py.Group, values: Mapping[str, object]) -> None:
    """Set attributes of a group; paths become text, and text that HDF5 cannot hold is escaped."""
    for name, value in values.items():
        group.attrs[name] = list(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: object) -> object:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        # A path may have bytes that are not UTF-8, and Open MPI's version ends with a NUL.
        value = value.encode(errors="backslashreplace").decode().replace("\0", "")
    return value
