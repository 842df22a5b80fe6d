"""Files of drivers/train_gpt.py, and their picture; no MPI import."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import needed, plain, reading

SCHEMA = ("a2d_mpi.training", 1)
NAME = 40  # characters of a file that are shown
SMOOTH = 50  # steps whose mean is drawn


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
    with reading(path, SCHEMA) as file:
        loss = needed(file, "loss", h5py.Dataset)[()]
        return Losses(
            loss, *(plain(needed(file, x).attrs) for x in ("config", "text", "held_out"))
        )


def draw_losses(plt, run: Losses, width: float):
    """Loss by tokens, beside the text's unigram entropy."""
    seqlen, steps = int(run.config["seqlen"]), len(run.loss)
    if not steps:
        raise ValueError("the run has no step")
    window = min(SMOOTH, steps)
    mean = np.convolve(run.loss, np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(width, 0.75 * width))
    tokens = np.arange(1, steps + 1) * seqlen / 1e3
    axes.plot(tokens, run.loss, color="#56B4E9", linewidth=0.3, alpha=0.6)
    axes.plot(tokens[window - 1 :], mean, color="#0072B2", label=f"mean of {window} steps")
    entropy = run.text["unigram_entropy"]
    axes.axhline(entropy, color="black", linestyle="--", linewidth=0.8,
                 label=f"unigram entropy, {entropy:.2f}")  # fmt: skip
    if run.held_out:
        held = run.held_out["loss"]
        axes.plot(tokens[-1:], [held], "D", color="#D55E00", label=f"held-out text, {held:.2f}")
    axes.set(xlim=0, ylim=(0, 1.05 * run.loss.max()), xlabel="thousand tokens")
    axes.set_ylabel("loss, nats per byte")
    bits = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits per byte")
    name = str(run.text["name"])
    name = name if len(name) <= NAME else name[: NAME - 3] + "..."
    return figure, axes, f"{name}, {steps} steps of {seqlen} tokens"
