"""The figure of a file of drivers/train.py gpt; no MPI import."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from a2d_mpi.figures.pictures import WIDTH, finish

NAME = 40  # characters of a file that are shown
SMOOTH = 50  # steps whose mean is drawn


def draw_losses(plt, run: Mapping):
    """Draw the loss by tokens, beside the text's unigram entropy."""
    seqlen, steps = int(run["config"]["seqlen"]), len(run["loss"])
    if not steps:
        raise ValueError("the run has no step")
    window = min(SMOOTH, steps)
    mean = np.convolve(run["loss"], np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(WIDTH, 0.45 * WIDTH))
    tokens = np.arange(1, steps + 1) * seqlen / 1e3
    axes.plot(tokens, run["loss"], color="#56B4E9", linewidth=0.3, alpha=0.6, label="each step")
    axes.plot(tokens[window - 1 :], mean, color="#0072B2", label=f"mean of {window} steps")
    entropy = run["text"]["unigram_entropy"]
    axes.axhline(entropy, color="black", linestyle="--", linewidth=0.8,
                 label=f"unigram entropy, {entropy:.2f}")  # fmt: skip
    if run["held_out"]:
        held = run["held_out"]["loss"]
        axes.plot(tokens[-1:], [held], "D", color="#D55E00", label=f"held-out text, {held:.2f}")
    axes.set(xlim=0, ylim=(0, 1.05 * run["loss"].max()), xlabel="thousand tokens")
    axes.set_ylabel("loss, nats per byte")
    bits = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits per byte")
    name = str(run["text"]["name"])
    name = name if len(name) <= NAME else name[: NAME - 3] + "..."
    return finish(figure, f"{name}, {steps} steps of {seqlen} tokens")
