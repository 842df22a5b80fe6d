"""What a training step costs: counts, predictions, and the benchmark that checks them."""

import tracemalloc
from dataclasses import replace

import h5py
import numpy as np
import pytest
from gpts import alone
from helpers import ROOT, assert_all, drive, drive_each
from machines import machine

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.sweep import Case
from a2d_mpi.gpt.config import PRESETS, GPTConfig
from a2d_mpi.gpt.cost import STEP_PARTS, activations, predict_step, product_flops, sum_seconds
from a2d_mpi.gpt.exchange import GradientSum
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.machine import Link
from a2d_mpi.planning.planner import candidate

MODEL = GPTConfig(64, 5, 96, 4, 384, nheads_kv=2)


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-6.7b", "gpt3-175b", "mfa-tiny"])
def test_products_are_six_operations_a_weight(name):
    """A weight takes two operations forward and four backward (arXiv:2001.08361)."""
    config = PRESETS[name]
    matrices = {x: y for x, y in config.shapes.items() if len(y) == 2 and x != "wpe"}
    weights = sum(int(np.prod(x)) for x in matrices.values())
    assert product_flops(config) == 6 * weights
    blocks = weights - config.vocab * config.width
    assert product_flops(config, recompute=True) == 6 * weights + 2 * blocks


def peak(config, recompute):
    """Return the bytes that loss and gradients allocate on one rank."""
    plan = alone(config, Causal(), config.seqlen, "float32")
    weights = Parameters(config, initial(config, 0, "f4"))
    gradients = Parameters(config, np.zeros_like(weights.flat))
    model = GPT(weights, plan, checkpoint=recompute)
    tokens = np.arange(config.seqlen) % config.vocab
    model.loss(tokens, tokens, len(tokens), gradients)
    tracemalloc.start()
    model.loss(tokens, tokens, len(tokens), gradients)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("vocab, headdim", [(64, 24), (2048, 24), (64, 72)])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations(recompute, vocab, headdim):
    config = replace(MODEL, vocab=vocab, headdim=headdim)
    predicted = 4 * config.seqlen * activations(config, recompute)
    assert peak(config, recompute) == pytest.approx(predicted, rel=0.15)


@pytest.mark.mpi
def test_sums_move_what_is_predicted(comm):
    """With a link of one byte per second, seconds are bytes."""
    link = Link(1.0)
    flat = np.ones(40 * comm.size, np.float32)
    gradients = GradientSum(comm, flat)
    gradients.start(slice(None))
    gradients.finish()
    [half] = sum_seconds(machine(link), comm.size, [flat.nbytes])
    gradients.free()
    assert_all(comm, 2 * half == pytest.approx(gradients.nbytes), half)
    assert_all(comm, (flat == comm.size).all(), flat)


def test_prediction_adds_up():
    """More ranks share the work; sums of gradients hide behind all layers but the last."""
    fast, slow = (machine(Link(x), copy=1e10) for x in (1e12, 1e7))
    config = replace(PRESETS["gpt3-125m"], seqlen=4096)
    case = Case(seqlen=4096, **config.heads, mask="causal", backward=True)
    steps = {}
    for ranks in (1, 4):
        for name, here in (("fast", fast), ("slow", slow)):
            plan = candidate(here, "ring", Layout(ranks, 1), case.work())
            steps[name, ranks] = predict_step(here, plan, config, 4096, "float32")
    assert steps["fast", 1].seconds["gradients"] == steps["fast", 1].seconds["wait"] == 0
    for name in ("fast", "slow"):
        for part in ("other", "attention"):
            ratio = steps[name, 1].seconds[part] / steps[name, 4].seconds[part]
            assert ratio == pytest.approx(4, rel=0.05)  # calls have a price
    assert steps["fast", 4].total < steps["fast", 1].total < steps["slow", 4].total
    assert list(steps["slow", 4].seconds) == list(STEP_PARTS)
    # All of the second half, and at least the last of the first.
    whole = 2 * 0.75 * 4 * config.parameters / 1e7
    assert whole / 2 < steps["slow", 4].seconds["gradients"] <= whole
    assert steps["fast", 4].memory < steps["fast", 1].memory


OPTIONS = ("--preset", "gpt3-175b-layer", "--width", 32, "--nheads", 4, "--seqlen", 64,
           "--trials", 2, "--plans", "attention2d,ring")  # fmt: skip


def test_benchmark(tmp_path):
    """Runs are checked and repeated, and added to a file."""
    output = tmp_path / "step.h5"
    options = ["--output", output, *OPTIONS, "--profile", ROOT / "data/results/16x1.toml"]
    again = [*options, "--resume", "--recompute"]
    refused = [*options, "--preset", "tiny"]
    cases = [("bench.py", ["train", *x], []) for x in (options, again, refused)]
    done, found = drive_each(cases, 2)
    assert [code for code, _ in found] == [0, 0, 2], done.stderr
    assert "exists" in done.stderr
    with h5py.File(output) as file:
        assert len(file["runs"]) == 4
        for run in file["runs"].values():
            assert run.attrs["passed"] and run["seconds"].shape == (2, 2, len(STEP_PARTS))
            assert run["checks/gradients"].attrs["error"] < 1e-5


def test_benchmark_fails(tmp_path):
    """The benchmark fails if the model and the textbook differ."""
    sabotage = """
from a2d_mpi.core import reference
right = reference.attention
def wrong(*args):
    out, lse = right(*args)
    return out * 1.001, lse
reference.attention = wrong
"""
    output = tmp_path / "step.h5"
    options = ["train", "--output", output, *OPTIONS]
    done = drive("bench.py", 1, *options, sabotage=sabotage, code=FAILED_CHECK)
    assert "FAILED" in done.stdout


def test_plan_of_steps():
    """The planner prints a table of steps, and --gpt sets the heads."""
    common = ["--profile", ROOT / "data/machines/h100-64x1.toml", "--ranks", 4, "--seqlen", "8K"]
    model = ["--gpt", "gpt3-125m", "--mask", "full"]  # under which two plans are simulated
    _, found = drive_each([("plan.py", [*common, *model, "--recompute", "--top", 2], [])], 0)
    assert [code for code, _ in found] == [0]
    table = found[0][1].split("training steps of gpt3-125m")[1].splitlines()
    assert "12 layers of width 768" in table[0]
    columns = ["method", "grid", "total", *STEP_PARTS, "tokens/s", "memory"]
    assert len(table) == 5 and table[2].split() == columns
