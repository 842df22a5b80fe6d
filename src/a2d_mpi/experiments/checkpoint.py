"""Checkpoints: whole or not at all, and none that is damaged is taken."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import h5py
import numpy as np

from a2d_mpi.experiments.files import CHECKPOINT
from a2d_mpi.experiments.hdf5 import needed, plain, reading
from a2d_mpi.experiments.results import new_file, set_attributes
from a2d_mpi.gpt.config import GPTConfig

SCHEMA = ("a2d_mpi.gpt", 1)
KEPT = 2  # the latest ones of a run; the one before the last is there if that is damaged
_ARRAYS = ("weights", "moments", "losses", "seconds")


@dataclass
class State:
    """A training run after a step.

    Attributes
    ----------
    config : GPTConfig
    run : dict
        Options that must be the same when it goes on.
    step : int
        Updates so far.
    weights : (parameters,) ndarray
    moments : (2, parameters) ndarray
        Of Adam.
    losses, seconds : (step,) float64
        Of every step so far.
    ranges : list of dict
        What may change the bits (grid, kernel, BLAS, ...) by ranges of steps, "begin" to "end".
    """

    config: GPTConfig
    run: dict[str, object]
    step: int
    weights: np.ndarray
    moments: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    ranges: list[dict[str, object]] = field(default_factory=list)

    def digest(self) -> str:
        """Of all numbers."""
        known = [asdict(self.config), self.run, self.step]
        known += [self.ranges] * bool(self.ranges)  # older files have none
        found = hashlib.sha256(json.dumps(known).encode())
        for name in _ARRAYS:
            found.update(np.ascontiguousarray(getattr(self, name)))
        return found.hexdigest()

    def ranges_with(self, settings: Mapping[str, object]) -> list[dict[str, object]]:
        """The ranges of a run that goes on with these settings; the last one is to be extended."""
        if self.ranges and _settings(self.ranges[-1]) == settings:
            return [dict(x) for x in self.ranges]
        return [*self.ranges, {"begin": self.step, "end": self.step, **settings}]

    def other_bits(self, ranges: Sequence[Mapping[str, object]]) -> str:
        """Why a run that goes on with these ranges differs from an uninterrupted one; or empty."""
        if not self.step or len(ranges) == len(self.ranges):
            return ""
        if not self.ranges:
            return "the checkpoint does not say what computed it: bits may differ from now on"
        was, now = map(_settings, (self.ranges[-1], ranges[-1]))
        differ = [f"{x} was {was.get(x)}, is {y}" for x, y in now.items() if was.get(x) != y]
        return f"{'; '.join(differ)}: from now on bits differ from an uninterrupted run's"


def _settings(found: Mapping[str, object]) -> dict[str, object]:
    return {name: x for name, x in found.items() if name not in ("begin", "end")}


def save(folder: Path, state: State) -> Path:
    """Write a checkpoint, and remove earlier ones of the run, but the latest; returns its path.

    Files of other runs, of later steps and damaged ones are left alone.

    Raises
    ------
    OSError
        If it cannot be written; those before are still there then.
    """
    path = folder / f"step-{state.step:09}.h5"
    with new_file(path) as file:
        set_attributes(file, {"schema": SCHEMA[0], "schema_version": SCHEMA[1]})
        for name, x in (*_identity(state), ("ranges", state.ranges)):
            set_attributes(file, {name: json.dumps(x)})
        set_attributes(file, {"step": state.step, "sha256": state.digest()})
        for name in _ARRAYS:
            file[name] = getattr(state, name)
    earlier = [x for x in _paths(folder) if x.name < path.name and _is_of(x, state)]
    for old in earlier[KEPT - 1 :]:
        old.unlink()
    return path


def load(path: Path) -> State:
    """Read a checkpoint.

    Raises
    ------
    OSError
        If it cannot be read, or is damaged.
    ValueError
        If it is none.
    """
    with reading(path, SCHEMA) as file:
        try:
            state = _read(file)
        except (ValueError, ArithmeticError, AttributeError) as error:
            raise OSError(f"it is damaged: {error}") from error
        if plain(file.attrs)["sha256"] != state.digest():
            raise OSError("its checksum is another: it is damaged")
    return state


def _read(file: h5py.File) -> State:
    """The state of a file, whose sizes fit each other; the checksum is not looked at."""
    found = plain(file.attrs)
    parts = [json.loads(found.get(x, "[]")) for x in ("config", "run", "ranges")]
    if [type(x) for x in parts] != [dict, dict, list] or not isinstance(found["step"], int):
        raise ValueError("config, run, ranges or step are of another type")
    config, step = GPTConfig(**parts[0]), found["step"]
    n = config.parameters
    shapes = dict(zip(_ARRAYS, ((n,), (2, n), (step,), (step,))))
    for name, shape in shapes.items():
        data = needed(file, name, h5py.Dataset)
        if data.shape != shape or data.dtype.kind != "f":
            raise ValueError(f"{name} has shape {data.shape} and dtype {data.dtype}, must have "
                             f"{shape} and real numbers")  # fmt: skip
    return State(config, parts[1], step, *(file[x][()] for x in _ARRAYS), parts[2])


def latest(folder: Path) -> tuple[State | None, dict[Path, str]]:
    """The latest checkpoint of a folder that is whole, and why later ones were refused."""
    refused: dict[Path, str] = {}
    for path in _paths(folder):
        try:
            return load(path), refused
        except (OSError, ValueError) as error:
            if not path.exists():  # a run that goes on has removed it, and written another
                return latest(folder)
            with open(path, "rb"):  # what may not be read may be whole
                refused[path] = str(error)
    return None, refused


def newest(folder: Path) -> State | None:
    """`latest`, with a line on stderr for each that was refused."""
    state, refused = latest(folder)
    for why in refused.values():
        print(f"refused: {why}", file=sys.stderr, flush=True)
    return state


def resumed(
    folder: Path, config: GPTConfig, run: Mapping[str, object], resume: bool
) -> State | None:
    """The state that a run goes on from; None if the folder has no checkpoints.

    Damaged ones after it are renamed, with a line on stderr for each.

    Raises
    ------
    ValueError
        If there are checkpoints, and the run does not `resume`, or none is whole, or the latest
        is of another run.
    OSError
        If one of them may not be read.
    """
    if not _all(folder):
        return None
    anew = "--anew moves them away and begins at the first step"
    if not resume:
        raise ValueError(f"{folder} has checkpoints; --resume goes on from the latest, {anew}")
    state, refused = latest(folder)
    if state is None:
        why = "; ".join(refused.values()) or "damaged ones were renamed"
        raise ValueError(f"{folder} has no checkpoint that is whole: {why}; {anew}")
    was, wanted = ({**asdict(c), **r} for c, r in ((state.config, state.run), (config, run)))
    differ = [f"{x} was {was.get(x)}, is {wanted[x]}" for x in wanted if was.get(x) != wanted[x]]
    if differ:
        raise ValueError(f"the run in {folder} is another: {'; '.join(differ)}")
    for path, why in refused.items():
        to = _unused(path.with_name(f"{path.name}.damaged"))
        path.rename(to)
        print(f"refused, and renamed to {to.name}: {why}", file=sys.stderr, flush=True)
    return state


def put_away(folder: Path) -> None:
    """Move all checkpoints of a folder into a new folder in it, with a line on stderr."""
    found = _all(folder)
    if not found:
        return
    to = _unused(folder / "before")
    to.mkdir()
    for path in found:
        path.rename(to / path.name)
        print(f"{path} is now {to / path.name}", file=sys.stderr, flush=True)


def _unused(path: Path) -> Path:
    """The path, or the first with a number that is not there."""
    return next(
        x for i in count(1) if not (x := path.with_name(path.name + f"-{i}" * (i > 1))).exists()
    )


def _identity(state: State) -> tuple[tuple[str, object], ...]:
    """Attributes that tell runs apart."""
    return ("config", asdict(state.config)), ("run", state.run)


def _is_of(path: Path, state: State) -> bool:
    """Tell if a file is a checkpoint of the run of a state, which can be opened."""
    try:
        with reading(path, SCHEMA) as file:
            found = plain(file.attrs)
            return all(json.loads(found[name]) == x for name, x in _identity(state))
    except (OSError, ValueError):
        return False


def _all(folder: Path) -> list[Path]:
    """Checkpoints and damaged ones that were renamed, the earliest first."""
    return sorted(x for x in folder.iterdir() if CHECKPOINT.match(x.name))


def _paths(folder: Path) -> list[Path]:
    """Checkpoints, the latest first."""
    return sorted(
        (x for x in folder.glob("step-*.h5") if CHECKPOINT.fullmatch(x.name)), reverse=True
    )
