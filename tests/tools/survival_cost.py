"""What going on costs as long as nobody dies: seconds of a training step, in turn.

    python tests/tools/survival_cost.py --ranks 4 --rounds 7

Trains the model of docs/models.md's first command by the same Open MPI: without and with its fault
tolerance, and with --survive.  Prints the median step of each, and the median and range of the
ratios of the rounds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import statistics
import tempfile
from pathlib import Path

import h5py
import numpy as np
from helpers import DRIVERS, ROOT, launch
from test_ulfm import ULFM

from a2d_mpi.experiments.origin import cpu_name

WAYS = {"without": ((), ()), "ulfm": (ULFM, ()), "ulfm, --survive": (ULFM, ("--survive",))}


def step_seconds(ranks, steps, mpi, more):
    """Median seconds of a step, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.h5")
        options = ["LICENSE", "--preset", "tiny", "--seqlen", 256, "--steps", steps]
        options += ["--separator", r"\n\n", "--every", steps, "--folder", folder, "--output", path]
        command = DRIVERS / "train.py", "gpt", *options, *more
        launch(ranks, *command, timeout=300, cwd=ROOT, options=mpi)
        with h5py.File(path) as file:
            return float(np.median(file["seconds/total"][5:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    seconds = {name: [] for name in WAYS}
    for number in range(args.rounds):
        order = list(WAYS.items())
        for name, (mpi, more) in order[:: 1 if number % 2 else -1]:
            seconds[name].append(step_seconds(args.ranks, args.steps, mpi, more))
    print(f"{cpu_name()}, {args.ranks} ranks")
    for name, found in seconds.items():
        ratios = [x / y for x, y in zip(found, seconds["without"])]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name:16s} {statistics.median(found) * 1e3:7.2f} ms a step, ratio {ratio}")


if __name__ == "__main__":
    main()
