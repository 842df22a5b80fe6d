"""Checkpoints of a training run: written completely or not at all; damaged ones are refused."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.hdf5 import read_file, reading, write_file
from a2d_mpi.gpt.config import GPTConfig

SCHEMA = ("a2d_mpi.gpt", 2)
KEPT = 2  # checkpoints of a run that are kept: the latest, and one more in case it is damaged
_ARRAYS = ("weights", "moments", "losses", "seconds")


@dataclass
class State:
    """The state of a training run after a step.

    Attributes
    ----------
    config : GPTConfig
    run : dict
        Options that must be the same when the run is resumed.
    weights : (parameters,) ndarray
    moments : (2, parameters) ndarray
        Adam's two moments of each parameter.
    losses, seconds : (step,) float64
        Loss and seconds of every step so far.
    ranges : list of dict
        Settings that may change the bits of results (grid, kernel, BLAS, ...), one dict for each
        range of steps from "begin" to "end".
    """

    config: GPTConfig
    run: dict[str, object]
    weights: np.ndarray
    moments: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    ranges: list[dict[str, object]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Updates so far."""
        return len(self.losses)

    def add_step(self, loss: float, seconds: float, settings: Mapping[str, object]) -> None:
        """Count a step that was computed with these settings; the caller changes the weights."""
        if not self.ranges or differences(self.ranges[-1], settings):
            self.ranges.append({"begin": self.step, "end": self.step, **settings})
        self.losses = np.append(self.losses, loss)
        self.seconds = np.append(self.seconds, seconds)
        self.ranges[-1]["end"] = self.step

    def tree(self) -> dict[str, object]:
        """Return the contents of a checkpoint: texts in JSON, arrays, and the SHA-256 of all."""
        values = {"config": self.config.stored, "run": self.run, "ranges": self.ranges}
        texts = {name: json.dumps(x) for name, x in values.items()}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        digest = hashlib.sha256(json.dumps([texts, self.step]).encode())
        for x in arrays.values():
            digest.update(np.ascontiguousarray(x))
        return {**texts, **arrays, "step": self.step, "sha256": digest.hexdigest()}


def save(folder: Path, state: State) -> Path:
    """Write a checkpoint, and remove earlier ones except the latest; return its path.

    Files of other runs, files of later steps, and damaged files are not removed.

    Raises
    ------
    OSError
        If it cannot be written; earlier checkpoints are kept.
    """
    path, tree = folder / f"step-{state.step:09}.h5", state.tree()
    write_file(path, SCHEMA, tree)
    earlier = [x for x in _paths(folder) if x.name < path.name and _is_of_run(x, tree)]
    for old in earlier[KEPT - 1 :]:
        old.unlink()
    return path


def load(path: Path) -> State:
    """Read a checkpoint.

    Parameters
    ----------
    path : Path

    Returns
    -------
    State

    Raises
    ------
    OSError
        If the file cannot be read, or is damaged.
    ValueError
        If the file is not a checkpoint.
    """
    root = read_file(path, SCHEMA)
    try:
        config, run, ranges = (json.loads(root[x]) for x in ("config", "run", "ranges"))
        state = State(GPTConfig(**config), run, *(root[x] for x in _ARRAYS), ranges)
        if root["sha256"] == state.tree()["sha256"]:
            return state
        why = "its checksum does not match"
    except (AttributeError, TypeError, ValueError) as error:
        why = str(error)
    raise OSError(f"cannot read {path} as HDF5: it is damaged: {why}")


def latest(folder: Path) -> tuple[State | None, dict[Path, str]]:
    """Return the latest undamaged checkpoint of a folder, and why later ones were refused.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    State or None
        None if the folder has no undamaged checkpoint.
    dict of Path to str
        The reason for each later checkpoint that was refused.

    Raises
    ------
    OSError
        If this process may not read a later checkpoint, which might be undamaged.
    """
    refused: dict[Path, str] = {}
    for path in _paths(folder):
        try:
            return load(path), refused
        except (OSError, ValueError) as error:
            if not path.exists():  # a running job has removed it, and written a later one
                return latest(folder)
            with open(path, "rb"):  # raises OSError if this process may not read the file
                refused[path] = str(error)
    return None, refused


def resumed(
    folder: Path, config: GPTConfig, run: Mapping[str, object], resume: bool
) -> State | None:
    """Return the state from which a run resumes; None if the folder has no checkpoints.

    Damaged checkpoints of later steps are renamed, with a line on stderr for each.

    Raises
    ------
    ValueError
        If there are checkpoints and `resume` is false, or all are damaged, or the latest belongs
        to another run.
    OSError
        If this process may not read a checkpoint.
    """
    if not _paths(folder, ".h5*"):
        return None
    if not resume:
        raise ValueError(
            f"{folder} has checkpoints; --resume continues from the latest, "
            "another --folder begins anew"
        )
    state, refused = latest(folder)
    if state is None:
        why = "; ".join(refused.values()) or "damaged ones were renamed"
        raise ValueError(f"{folder} has no complete checkpoint: {why}")
    was, wanted = ({**asdict(c), **r} for c, r in ((state.config, state.run), (config, run)))
    if changes := differences(was, wanted):
        raise ValueError(f"the run in {folder} has other options: {changes}")
    for path, why in refused.items():
        aside = path.with_name(f"{path.name}.damaged")
        path.rename(aside)
        print(f"renamed to {aside.name}, because {why}", file=sys.stderr, flush=True)
    return state


def differences(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return a text that says which values differ; it is empty if none differs."""
    return "; ".join(
        f"{name} was {was.get(name)}, now {x}" for name, x in now.items() if was.get(name) != x
    )


def _is_of_run(path: Path, tree: Mapping[str, object]) -> bool:
    """Return whether a file is a readable checkpoint of the same run as another one's contents."""
    try:
        with reading(path, SCHEMA) as file:
            return all(file.attrs[name] == tree[name] for name in ("config", "run"))
    except (OSError, ValueError):
        return False


def _paths(folder: Path, end: str = ".h5") -> list[Path]:
    """List checkpoints, the latest first; with the end ".h5*" also renamed damaged ones."""
    return sorted(folder.glob(f"step-{'[0-9]' * 9}{end}"), reverse=True)
