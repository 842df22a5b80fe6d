"""The GPT: gradients, the same losses on all grids, and runs that continue."""

from itertools import product

import h5py
import numpy as np
import pytest
from gpts import alone, lone, shaken, trainer_of
from helpers import DEEPER, ROOT, assert_all, assert_each_refused, drive
from mpi4py import MPI

from a2d_mpi import Documents
from a2d_mpi.experiments.checkpoint import latest, load
from a2d_mpi.gpt.adam import Adam, learning_rate
from a2d_mpi.gpt.config import PRESETS, GPTConfig
from a2d_mpi.gpt.gradients import GradientSum, total
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Text

pytestmark = pytest.mark.grids


def small(positions="learned", nheads_kv=1, headdim=None):
    return GPTConfig(17, 2, 12, 3, 40, nheads_kv, positions, headdim)


SHAPES = [("learned", None), ("rotary", None), ("rotary", 10)]


@pytest.mark.parametrize("positions, headdim", SHAPES)
def test_gradients(positions, headdim):
    """Gradients of every kind of parameter equal differences; checkpointing keeps the bits."""
    config, rng = small(positions, headdim=headdim), np.random.default_rng(1)
    weights, mask = shaken(config), Documents([0, 4, 9], causal=True)
    tokens, targets = rng.integers(0, 17, (2, 9))
    targets[3] = -1
    found = []
    for checkpoint in (False, True):
        model = GPT(weights, alone(config, mask, 9), np.arange(9) % 5, checkpoint)
        gradients, parts = Parameters(config, np.ones(config.parameters)), []
        model.loss(tokens, targets, 8, gradients, parts.append)
        found.append(gradients.flat.tobytes())
        ends = [(x.start, x.stop) for x in parts]
        assert ends[0][1] == config.parameters and ends[-1][0] == 0
        assert all(a[0] == b[1] for a, b in zip(ends, ends[1:]))
    assert found[0] == found[1]
    for name, part in weights.named.items():
        flat, slope = part.reshape(-1), gradients.named[name].reshape(-1)
        for i in rng.integers(0, len(flat), 4):
            both, value = [], flat[i]
            for step in (1e-6, -1e-6):
                flat[i] = value + step
                both.append(model.loss(tokens, targets, 8))
            flat[i] = value
            assert (both[0] - both[1]) / 2e-6 == pytest.approx(slope[i], abs=1e-8, rel=1e-6), name


def test_config():
    assert PRESETS["gpt3-175b"].parameters == pytest.approx(175e9, rel=0.01)
    assert PRESETS["gpt3-125m"].parameters == pytest.approx(125e6, rel=0.02)
    shared = PRESETS["mfa-tiny"]
    assert shared.shapes["h0.qkv.weight"] == (128, (4 + 2) * 64)
    assert shared.shapes["h0.proj.weight"] == (4 * 64, 128)
    assert GPTConfig(**shared.stored) == shared and shared.stored["headdim"] == 64
    assert GPTConfig(**PRESETS["tiny"].stored) == PRESETS["tiny"]
    assert "headdim" not in PRESETS["tiny"].stored  # checkpoints from before have none
    for bad, told in (
        ({"layers": 0}, "layers must be a positive integer, got 0"),
        ({"nheads": 5}, "width 12, nheads 5"),
        ({"nheads_kv": 2}, "nheads_kv 2"),
        ({"positions": "rotary", "nheads": 4}, "even headdim, got 3"),
        ({"positions": "none"}, "got 'none'"),
        ({"layer_pattern": "LX"}, "layer_pattern must consist of L and N, got 'LX'"),
        ({"layer_pattern": "LN", "nheads_kv": 1}, "got nheads 3 and nheads_kv 1"),
        ({"headdim": 0}, "headdim must be a positive integer, got 0"),
        ({"headdim": 5, "positions": "rotary"}, "even headdim, got 5"),
    ):
        sizes = {"vocab": 17, "layers": 2, "width": 12, "nheads": 3, "seqlen": 40}
        with pytest.raises(ValueError, match=told):
            GPTConfig(**{**sizes, **bad})


def test_adam():
    """An update equals the formulas, written out for one number."""
    config = GPTConfig(1, 1, 1, 1, 1)
    weights = Parameters(config, np.full(config.parameters, 0.5))
    gradients = Parameters(config, np.zeros(config.parameters))
    adam = Adam(weights, np.zeros((2, config.parameters)))
    w, m, v = 0.5, 0.0, 0.0
    for step, g in enumerate((0.03, -0.1, 0.01), 1):
        gradients.flat[:] = g
        adam.update(gradients, 0.01)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**step)) / (
            (v / (1 - 0.95**step)) ** 0.5 + 1e-8
        )
        assert weights.named["wte"][0, 0] == pytest.approx(w, rel=1e-12)
    clipped = Adam(weights, np.zeros((2, config.parameters)))
    gradients.flat[:] = 10.0
    assert clipped.update(gradients, 0.0) == pytest.approx(10 * config.parameters**0.5)
    assert (gradients.flat**2).sum() == pytest.approx(1)
    assert [learning_rate(x, 1.0, 2, 10) for x in (0, 1, 2, 10)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.1]
    )


def test_text(tmp_path):
    """Batches have the right documents, targets and positions, also at the end of the text."""
    (path := tmp_path / "text").write_bytes(b"ab--cdefg--h")
    text, seen = Text(path, b"--"), set()
    assert bytes(text.bytes.astype(np.uint8)) == b"abcdefgh"
    assert text.begins.tolist() == [0, 2, 7, 8]  # fmt: skip
    document = np.repeat([0, 1, 2], [2, 5, 1])
    for step in range(40):
        batch = text.batch(11, 0, step)
        starts = [i for i in range(8) if (np.roll(text.bytes, -i) == batch.tokens[:8]).all()]
        start = starts[0]
        seen.add(start)
        where = (start + np.arange(12)) % 8
        same = (document[where[1:]] == document[where[:-1]]) & (where[1:] > 0)
        assert (batch.targets == np.where(same, text.bytes[where[1:]], -1)).all()
        ends = np.append(np.flatnonzero(~same[:-1]) + 1, 11)
        assert batch.cu_seqlens.tolist() == [0, *ends]
        begins = np.repeat([0, *ends[:-1]], np.diff([0, *ends]))
        assert (batch.positions == np.arange(11) - begins).all()
    assert len(seen) == 8
    assert (Text(path, b"").batch(11, 0, 0).targets >= 0).all()
    (tmp_path / "empty").write_bytes(b"----")
    with pytest.raises(ValueError, match="has no text"):
        Text(tmp_path / "empty", b"--")


def losses(comm, grid, method, dtype, steps, separator):
    """Return the losses of a training run of a small model."""
    config, text = GPTConfig(256, 2, 12, 6, 61, nheads_kv=2), Text(ROOT / "LICENSE", separator)
    options = {"method": method, "dtype": dtype, "separator": separator, "steps": steps}
    options |= {"rate": 3e-3, "seed": 1, "recompute": method == "ring"}
    weights = initial(config, 0, dtype)
    trainer = trainer_of(comm, grid, config, text, weights, **options)
    found = [trainer.step() for _ in range(steps)]
    trainer.free()
    return np.array(found), weights


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("dtype, bound, steps, separator", [
    pytest.param("float32", 1e-5, 50, b"", marks=DEEPER), ("float64", 1e-10, 8, b" "),
    pytest.param("float64", 1e-10, 50, b"", marks=DEEPER),
])  # fmt: skip
def test_same_losses(comm, grid_of, dtype, bound, steps, separator):
    """Losses on any grid and ring are those of one rank, and all ranks have equal weights."""
    run = dtype, steps if comm.size in (4, 6) else 4, separator
    expected, _ = losses(MPI.COMM_SELF, lone(), "attention2d", *run)
    shapes = [(r, comm.size // r) for r in range(1, comm.size + 1) if comm.size % r == 0]
    plans, bad = [*product(["attention2d"], shapes), ("ring", (comm.size, 1))], []
    for method, shape in [("attention2d", (2, 3))] if comm.size == 6 else plans:
        grid = grid_of(*shape)
        found, weights = losses(comm, grid, method, *run)
        error = np.abs(found / expected - 1).max()
        if not error <= bound:
            bad.append(f"{method} on {shape}: {error:.1e}")
        if len(set(comm.allgather(weights.tobytes()))) > 1:
            bad.append(f"{method} on {shape}: weights differ")
    assert expected[-1] < expected[0]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums(comm, dtype):
    """Gradients are summed in the order of ranks, bit for bit, in uneven parts."""
    of_ranks = [
        np.random.default_rng(p).standard_normal(103).astype(dtype) for p in range(comm.size)
    ]
    flat = of_ranks[comm.rank].copy()
    sums = GradientSum(comm, flat)
    for part in (slice(100, 103), slice(1, 100), slice(0, 1)):
        sums.start(part)
    sums.finish()
    expected = of_ranks[0].copy()
    for x in of_ranks[1:]:
        expected += x
    assert_all(comm, flat.tobytes() == expected.tobytes(), "another sum")
    shares = sum(-(-n // comm.size) for n in (3, 99, 1))
    assert sums.nbytes == 2 * (comm.size - 1) * shares * flat.itemsize * (comm.size > 1)
    assert total(comm, 0.1 * comm.rank) == sum(0.1 * p for p in range(comm.size))
    sums.free()


OPTIONS = [
    *("--layers", "1", "--width", "8", "--nheads", "2", "--seqlen", "40"),
    *("--steps", "9", "--every", "2", "--separator", " "),
]


@pytest.mark.launches
def test_goes_on(tmp_path):
    """A resumed run has the bits of an uninterrupted one, even if the latest file is damaged."""
    text, whole, parts = ROOT / "LICENSE", tmp_path / "whole", tmp_path / "parts"

    def trained(folder, *more):
        done = drive("train.py gpt", 2, text, "--folder", folder, *OPTIONS, *more)
        return done.stderr

    trained(whole, "--output", tmp_path / "log.h5")
    trained(parts)
    assert [x.name for x in sorted(parts.iterdir())] == ["step-000000008.h5", "step-000000009.h5"]
    damaged = parts / "step-000000009.h5"
    damaged.write_bytes(cut := damaged.read_bytes()[:-100])
    shown = trained(parts, "--resume")
    assert "renamed to step-000000009.h5.damaged, because " in shown
    assert (parts / "step-000000009.h5.damaged").read_bytes() == cut
    first, second = (load(x / "step-000000009.h5") for x in (whole, parts))
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.moments.tobytes() == second.moments.tobytes()
    assert first.losses.tolist() == second.losses.tolist() and len(first.losses) == 9
    assert latest(whole)[0].step == 9 and not latest(whole)[1]
    # Numbers of a whole HDF5 file that are others.
    with h5py.File(whole / "step-000000009.h5", "r+") as file:
        file["weights"][3] += 1
    with pytest.raises(OSError, match="its checksum does not match"):
        load(whole / "step-000000009.h5")
    assert latest(whole)[0].step == 8
    train = "train.py gpt", [text, "--folder", parts, *OPTIONS]
    assert_each_refused([
        (*train, ["--seed", "3"], "ranks disagree on --seed"),
        (train[0], [*train[1], "--resume", "--rate", "1"], [], "rate was 0.001, now 1.0"),
        (train[0], [*train[1], "--resume", "--width", "16"], [], "width was 8, now 16"),
    ], 2)  # fmt: skip
