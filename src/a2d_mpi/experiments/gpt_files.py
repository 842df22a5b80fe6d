"""Result files of drivers/train_gpt.py and drivers/bench_train.py; no MPI import."""

from __future__ import annotations

import os
from dataclasses import dataclass

import h5py
import numpy as np

from a2d_mpi.experiments.benchmark import Entry, read_entries
from a2d_mpi.experiments.hdf5 import needed, plain, reading
from a2d_mpi.gpt.cost import STEP_PARTS

TRAINING_SCHEMA = ("a2d_mpi.training", 1)
STEPS_SCHEMA = ("a2d_mpi training steps", 1)


@dataclass
class Losses:
    """The losses of a run, in nats a byte.

    Attributes
    ----------
    loss : (steps,) float64
        Of every step's sequence, before the step.
    config : dict
        Sizes of the model and options.
    text : dict
        name, sha256, documents, bytes and unigram_entropy of the text that was trained on.
    held_out : dict
        loss, documents, bytes and unigram_entropy of the rest; empty if nothing was held out.
    """

    loss: np.ndarray
    config: dict[str, object]
    text: dict[str, object]
    held_out: dict[str, object]


def read_losses(path: str | os.PathLike[str]) -> Losses:
    """Read a file; OSError or ValueError, with one line, if it is none."""
    with reading(path, TRAINING_SCHEMA) as file:
        loss = needed(file, "loss", h5py.Dataset)[()]
        return Losses(
            loss, *(plain(needed(file, x).attrs) for x in ("config", "text", "held_out"))
        )


class Steps(Entry):
    """Training steps by one plan; `a2d_mpi.experiments.bench_train` says what is in the group."""

    @property
    def plan(self) -> str:
        """Its name."""
        a = self.attributes
        return f"{a['method']} {a['rows']}x{a['cols']}x{a['heads']}"

    @property
    def seconds(self) -> float:
        """Of the slowest rank, median of all trials."""
        return float(np.median(self.arrays["seconds"].sum(axis=2).max(axis=1)))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of the slowest rank, medians."""
        seconds = self.arrays["seconds"]  # (trials, ranks, parts)
        slowest = seconds.sum(axis=2).argmax(axis=1)
        of_slowest = seconds[np.arange(len(seconds)), slowest]
        return dict(zip(STEP_PARTS, np.median(of_slowest, axis=0).tolist()))

    @property
    def operator(self) -> float:
        """Seconds of attention alone, once forward and backward; median."""
        return float(np.median(self.arrays["operator"].max(axis=1)))

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds by part; empty without a profile."""
        found = {x: self.attributes.get(f"predicted/{x}") for x in STEP_PARTS}
        return {} if None in found.values() else found


def read_steps(path: str | os.PathLike[str]) -> list[Steps]:
    """Read a file; OSError or ValueError, with one line, if it is none."""
    entries = read_entries(path, STEPS_SCHEMA).values()
    return [Steps(entry.attributes, entry.arrays) for entry in entries]
