"""Result files of drivers/train.py gpt and drivers/bench.py; no MPI import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import h5py
import numpy as np

from a2d_mpi.experiments.benchmark import Entry, read_entries, write_entries
from a2d_mpi.experiments.hdf5 import needed, plain, reading
from a2d_mpi.gpt.cost import STEP_PARTS

TRAINING_SCHEMA = ("a2d_mpi.training", 1)
STEPS_SCHEMA = ("a2d_mpi training steps", 1)
LINEAR_SCHEMA = ("a2d_mpi linear attention", 1)


@dataclass
class Losses:
    """The losses of a training run, in nats per byte.

    Attributes
    ----------
    loss : (steps,) float64
        Loss of each step's sequence before the step.
    config : dict
        Sizes of the model and options.
    text : dict
        name, sha256, documents, bytes and unigram_entropy of the training text.
    held_out : dict
        loss, documents, bytes and unigram_entropy of the held-out text; empty if there is none.
    """

    loss: np.ndarray
    config: dict[str, object]
    text: dict[str, object]
    held_out: dict[str, object]


def write_losses(
    path: str | os.PathLike[str], run: Losses, root: Entry, others: Mapping[str, Entry]
) -> None:
    """Write a file of drivers/train.py gpt or drivers/train.py llama.

    Parameters
    ----------
    path : path
    run : Losses
    root : Entry
        Origin, and arrays besides the losses.
    others : mapping of str to Entry
        More groups by name.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    entries = {"/": Entry(root.attributes, {"loss": run.loss, **root.arrays})}
    entries |= {x: Entry(getattr(run, x)) for x in ("config", "text", "held_out")}
    write_entries(path, TRAINING_SCHEMA, {**entries, **others}, extend=False)


def read_losses(path: str | os.PathLike[str]) -> Losses:
    """Read a file of `write_losses`.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is another kind of file; one line.
    """
    with reading(path, TRAINING_SCHEMA) as file:
        loss = needed(file, "loss", h5py.Dataset)[()]
        return Losses(
            loss, *(plain(needed(file, x).attrs) for x in ("config", "text", "held_out"))
        )


class Steps(Entry):
    """Training steps by one plan; `a2d_mpi.experiments.bench_train` describes the group."""

    @property
    def plan(self) -> str:
        """Name of the plan: method and shape."""
        a = self.attributes
        return f"{a['method']} {a['rows']}x{a['cols']}x{a['heads']}"

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank, median of all trials."""
        return float(np.median(self.arrays["seconds"].sum(axis=2).max(axis=1)))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the slowest rank by `STEP_PARTS`, medians of all trials."""
        seconds = self.arrays["seconds"]  # (trials, ranks, parts)
        slowest = seconds.sum(axis=2).argmax(axis=1)
        of_slowest = seconds[np.arange(len(seconds)), slowest]
        return dict(zip(STEP_PARTS, np.median(of_slowest, axis=0).tolist()))

    @property
    def operator(self) -> float:
        """Seconds of attention alone, forward and backward once, median of all trials."""
        return float(np.median(self.arrays["operator"].max(axis=1)))

    @property
    def predicted(self) -> dict[str, float]:
        """Predicted seconds by `STEP_PARTS`; empty without a profile."""
        seconds = {x: self.attributes.get(f"predicted/{x}") for x in STEP_PARTS}
        return {} if None in seconds.values() else seconds


def read_steps(path: str | os.PathLike[str]) -> list[Steps]:
    """Read a file of `drivers/bench.py train`.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is another kind of file; one line.
    """
    entries = read_entries(path, STEPS_SCHEMA).values()
    return [Steps(entry.attributes, entry.arrays) for entry in entries]
