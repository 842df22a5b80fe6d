"""The GPT on CuPy arrays: the same losses and tokens as on NumPy arrays, by either transfers."""

import numpy as np
import pytest
from gpts import (
    CONFIG,
    continued,
    likeliest,
    lone,
    other_tokens,
    prompts,
    serve,
    shaken,
    trainer_of,
)
from helpers import ROOT, assert_all, drive_on_gpu
from mpi4py import MPI

from a2d_mpi.comm.gpus import bind_gpu
from a2d_mpi.devices.host import HOST
from a2d_mpi.gpt.apart import attention_grid, open_apart, weights_of_rank
from a2d_mpi.gpt.cache import step_traffic
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Text

pytestmark = pytest.mark.grids

STEPS = 3
SHORT = ROOT / "src/a2d_mpi/experiments/__init__.py"


def losses(comm, grid, dtype, transfers, positions, device=HOST):
    """Return the first losses of a small model, and the weights after them."""
    config = GPTConfig(256, 2, 12, 6, 21, nheads_kv=2, positions=positions)
    options = {"rate": 3e-3, "steps": 50, "seed": 1, "separator": b" ", "dtype": dtype}
    options |= {"transfers": transfers, "recompute": positions == "rotary"}
    text, weights = Text(SHORT, b" "), initial(config, 0, dtype)
    text.bytes, text.begins = text.bytes[:100], np.append(text.begins[text.begins < 100], 100)
    trainer = trainer_of(comm, grid, config, text, weights, device, **options)
    found = [*(trainer.step() for _ in range(STEPS)), trainer.evaluate(text)]
    weights = trainer.host_state().weights
    trainer.free()
    return np.array(found), weights


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("dtype, bound, transfers, positions", [
    ("float32", 1e-5, "device", "learned"), ("float64", 1e-10, "host", "rotary"),
])  # fmt: skip
def test_same_losses(comm, grid_of, cupy, dtype, bound, transfers, positions):
    device, _ = bind_gpu(comm)
    expected, _ = losses(MPI.COMM_SELF, lone(), dtype, transfers, positions)
    grid = grid_of(1, comm.size)
    found, weights = losses(comm, grid, dtype, transfers, positions, device)
    error = np.abs(found / expected - 1).max()
    assert_all(comm, error <= bound, f"{found}, not {expected}")
    assert_all(comm, len(set(comm.allgather(weights.tobytes()))) == 1, "weights differ")


SHORT_PROMPTS = {x: y for x, y in prompts().items() if len(y) < 10}


def wrong_tokens(whole, count):
    found = dict(serve(whole, SHORT_PROMPTS, dict.fromkeys(SHORT_PROMPTS, count), likeliest))
    return other_tokens(found, {x: continued(CONFIG, x, count) for x in SHORT_PROMPTS})


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("transfers", ["device", "host"])
def test_same_tokens(comm, grid_of, cupy, transfers):
    device, _ = bind_gpu(comm)
    weights = Parameters(CONFIG, device.upload(shaken(CONFIG).flat))
    heads = 2 if comm.size % 2 == 0 else 1
    grid, count = grid_of(1, comm.size // heads, heads), 5
    whole = Decoder(grid, weights, [9] * (comm.size // heads), block=8, transfers=transfers)
    bad = wrong_tokens(whole, count)
    expected = step_traffic(CONFIG, comm.size // heads, heads, len(SHORT_PROMPTS), 8)
    if whole.sent != tuple((count - 1) * x for x in expected):
        bad.append(f"{whole.sent} is not {count - 1} times {expected}")
    whole.free()
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.multirank
@pytest.mark.one_mpi
@pytest.mark.parametrize("transfers", ["device", "host"])
def test_apart(comm, cupy, transfers):
    """Tokens are the same with MLPs on ranks of their own."""
    device, _ = bind_gpu(comm)
    split, count = (comm.size - comm.size // 2, comm.size // 2), 4
    flat, shapes = weights_of_rank(shaken(CONFIG), comm.rank, split)
    weights = Parameters(CONFIG, device.upload(flat), shapes)
    grid = attention_grid(comm, split, (1, split[0], 1))
    whole = open_apart(comm, grid, split, weights, [9] * split[0], 8, transfers=transfers)
    bad = wrong_tokens(whole, count)
    whole.free()
    if grid:
        grid.free()
    assert_all(comm, not bad, "; ".join(bad))


def test_drivers(monkeypatch, tmp_path):
    """A training on the GPU continues on the host, which also generates from it."""
    text, folder = tmp_path / "text", tmp_path / "run"
    text.write_bytes(b"to be or not to be " * 20)
    options = [text, "--folder", folder, "--layers", 1, "--width", 8, "--nheads", 2]
    options += ["--seqlen", 24, "--steps", 4, "--separator", ""]
    gpu = ["--device", "gpu", "--transfers", "host"]
    shown = []
    for more in (["--every", 2, *gpu], ["--resume"]):
        drive_on_gpu(monkeypatch, "train.py gpt", 2, *options, *more)
        (folder / "step-000000004.h5").unlink(missing_ok="--every" in more)
    for more in ([], gpu):
        options = ["--prompt", "to be", "--prompt", "or", "--tokens", 6]
        done = drive_on_gpu(monkeypatch, "generate.py", 2, folder, *options, *more)
        shown.append(sorted(done.stdout.splitlines()[:2]))
    assert shown[0] == shown[1] and shown[0][1].startswith("1: 'or")
