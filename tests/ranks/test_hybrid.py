"""A GPT whose layers mix linear and exact attention."""

import numpy as np
import pytest
from gpts import alone, lone, shaken, trainer_of
from helpers import ROOT, assert_all, drive_each
from mpi4py import MPI

from a2d_mpi import Causal, LinearAttention
from a2d_mpi.experiments.checkpoint import latest
from a2d_mpi.gpt.config import LINEAR, GPTConfig
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Text

SIZES = {"width": 16, "nheads": 2, "seqlen": 61, "layer_pattern": "LLLN"}


def test_gradients():
    """Gradients of some parameters of each layer equal differences."""
    config = GPTConfig(17, 3, 12, 2, 40, positions="rotary", layer_pattern="LN")
    rng, weights = np.random.default_rng(1), shaken(config)
    sizes = {"seqlen": 9, "nheads": 2, "headdim": 6, "dtype": "float64"}
    linear = LinearAttention(lone(), Causal(), **sizes, **LINEAR)
    tokens, targets = rng.integers(0, 17, (2, 9))
    found = []
    for checkpoint in (False, True):
        plan = alone(config, Causal(), 9)
        model = GPT(weights, plan, np.arange(9), checkpoint, linear)
        gradients = Parameters(config, np.ones(config.parameters))
        model.loss(tokens, targets, 8, gradients)
        found.append(gradients.flat.tobytes())
    assert found[0] == found[1]
    for i in (*rng.integers(0, config.parameters, 60),):
        both, value = [], weights.flat[i]
        for step in (1e-6, -1e-6):
            weights.flat[i] = value + step
            both.append(model.loss(tokens, targets, 8))
        weights.flat[i] = value
        slope = (both[0] - both[1]) / 2e-6
        assert slope == pytest.approx(gradients.flat[i], abs=1e-8, rel=1e-6)
    with pytest.raises(ValueError, match="layer_pattern LN needs a plan of linear attention"):
        GPT(weights, alone(config, Causal(), 9))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_same_losses(comm, grid_of):
    """Losses are within 1e-5 of one rank's; another pattern gives other losses."""
    config, text = GPTConfig(256, 4, **SIZES), Text(ROOT / "LICENSE", b"")
    found = {}
    grid = grid_of(1, comm.size)
    for name, ranks, where in (("one", MPI.COMM_SELF, lone()), ("all", comm, grid)):
        weights = initial(config, 0, "float32")
        options = {"separator": b"", "dtype": "float32", "rate": 3e-3}
        trainer = trainer_of(ranks, where, config, text, weights, **options)
        found[name] = np.array([trainer.step() for _ in range(8)])
        traffic = dict(trainer._training.linear.traffic.bytes)
        trainer.free()
    error = np.abs(found["all"] / found["one"] - 1).max()
    bad = [f"losses differ by {error:.1e}"] * (not error <= 1e-5)
    # Zigzag: two states of 2 heads of 8 x 8 float32 numbers, in 3 layers and 8 steps.
    sent = 3 * 8 * (comm.size - 1) * 2 * 2 * 8 * 8 * 4
    counted = int(traffic["forward", "all"][0]) if comm.size > 1 else 0
    bad += [f"{counted} bytes, not {sent}"] * (counted != sent)
    assert found["one"][-1] < found["one"][0] - 0.1
    assert_all(comm, not bad, "; ".join(bad))


def test_a_pattern_of_which_no_layer_is_linear():
    """A model whose layers are all exact needs no plan of linear attention."""
    assert not GPTConfig(7, 2, 8, 2, 5, layer_pattern="NNNL").hybrid
    assert GPTConfig(7, 4, 8, 2, 5, layer_pattern="NNNL").hybrid


def test_driver(tmp_path):
    """The driver trains on two ranks, and refuses in a line what a hybrid model cannot do."""
    sizes = ["--layers", "4", "--width", "16", "--nheads", "2", "--seqlen", "40", "--steps", "3"]
    train = [ROOT / "LICENSE", *sizes, "--layer-pattern"]
    folder = ["--folder", tmp_path / "run"]
    cases = [
        ("train.py gpt", [*train, "LLLN", *folder, "--separator", ""], []),
        ("generate.py", [tmp_path / "run", "--prompt", "x"], []),
        ("train.py gpt", [*train, "LLLN", "--folder", tmp_path / "other"], []),
        ("train.py gpt", [*train, "LQ", "--folder", tmp_path / "other"], []),
    ]
    done, found = drive_each(cases, 2)
    assert [code for code, _ in found] == [0, 2, 2, 2], done.stderr
    assert latest(tmp_path / "run")[0].config.layer_pattern == "LLLN"
    for told in (
        "cannot decode with linear layers, got layer_pattern LLLN",
        "see all earlier tokens, and run on the host: they need --separator ''",
        "layer_pattern must consist of L and N, got 'LQ'",
    ):
        assert done.stderr.count(told) == 1, done.stderr
