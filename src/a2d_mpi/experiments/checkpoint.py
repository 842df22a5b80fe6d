"""Checkpoints: whole or not at all, and none that is damaged is taken."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import needed, plain, reading
from a2d_mpi.experiments.results import new_file, set_attributes
from a2d_mpi.gpt.config import GPTConfig

SCHEMA = ("a2d_mpi.gpt", 1)
KEPT = 2  # the latest ones; the one before the last is there if that is damaged
_ARRAYS = ("weights", "moments", "losses", "seconds")
_NAME = re.compile(r"step-(\d{9})\.h5")


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
    """

    config: GPTConfig
    run: dict[str, object]
    step: int
    weights: np.ndarray
    moments: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray

    def digest(self) -> str:
        """Of all numbers."""
        found = hashlib.sha256(json.dumps([asdict(self.config), self.run, self.step]).encode())
        for name in _ARRAYS:
            found.update(np.ascontiguousarray(getattr(self, name)))
        return found.hexdigest()


def save(folder: Path, state: State) -> Path:
    """Write a checkpoint, and remove all but the latest two; returns its path.

    Raises
    ------
    OSError
        If it cannot be written; those before are still there then.
    """
    path = folder / f"step-{state.step:09}.h5"
    with new_file(path) as file:
        set_attributes(file, {"schema": SCHEMA[0], "schema_version": SCHEMA[1]})
        config, run = (json.dumps(x) for x in (asdict(state.config), state.run))
        set_attributes(file, {"config": config, "run": run, "step": state.step})
        set_attributes(file, {"sha256": state.digest()})
        for name in _ARRAYS:
            file[name] = getattr(state, name)
    leftovers = folder.glob(".step-*.h5.*.tmp")  # of writers that were killed
    for old in (*_paths(folder)[KEPT:], *leftovers):
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
        found = plain(file.attrs)
        state = State(
            GPTConfig(**json.loads(found["config"])),
            json.loads(found["run"]),
            found["step"],
            *(needed(file, name, h5py.Dataset)[()] for name in _ARRAYS),
        )
        if found["sha256"] != state.digest():
            raise OSError("its checksum is another: it is damaged")
    return state


def latest(folder: Path) -> tuple[State | None, list[str]]:
    """The latest checkpoint of a folder that is whole, and why later ones were refused."""
    refused = []
    for path in _paths(folder):
        try:
            return load(path), refused
        except (OSError, ValueError) as error:
            refused.append(str(error))
    return None, refused


def newest(folder: Path) -> State | None:
    """`latest`, with a line on stdout for each that was refused."""
    state, refused = latest(folder)
    for why in refused:
        print(f"refused: {why}", flush=True)
    return state


def _paths(folder: Path) -> list[Path]:
    """Checkpoints, the latest first."""
    return sorted((x for x in folder.glob("step-*.h5") if _NAME.fullmatch(x.name)), reverse=True)
