"""The GPT: gradients, batches, and the same losses on all grids."""

from itertools import product

import numpy as np
import pytest
from gpts import alone, lone, shaken, trainer_of
from helpers import DEEPER, ROOT, assert_all, drive_each
from mpi4py import MPI

from a2d_mpi import Causal, Documents, LinearAttention
from a2d_mpi.experiments.checkpoint import latest
from a2d_mpi.gpt.config import LINEAR, PRESETS, GPTConfig
from a2d_mpi.gpt.exchange import GradientSum, total
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Text
from a2d_mpi.gpt.training import Adam, learning_rate

pytestmark = pytest.mark.grids


def small(positions="learned", nheads_kv=1, headdim=None):
    return GPTConfig(17, 2, 12, 3, 40, nheads_kv, positions, headdim)


CONFIGS = {
    "learned": small(),
    "rotary": small("rotary"),
    "wide heads": small("rotary", headdim=10),
    "hybrid": GPTConfig(17, 3, 12, 2, 40, positions="rotary", layer_pattern="LN"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name):
    """Gradients of every kind of parameter equal differences; checkpointing keeps the bits."""
    config, rng, linear = CONFIGS[name], np.random.default_rng(1), None
    weights, mask, positions = shaken(config), Documents([0, 4, 9], causal=True), np.arange(9) % 5
    if config.hybrid:
        sizes = {"seqlen": 9, "nheads": 2, "headdim": 6, "dtype": "float64"}
        mask, positions = Causal(), np.arange(9)
        linear = LinearAttention(lone(), mask, **sizes, **LINEAR)
        with pytest.raises(ValueError, match="layer_pattern LN needs a plan of linear attention"):
            GPT(weights, alone(config, mask, 9))
    tokens, targets = rng.integers(0, 17, (2, 9))
    targets[3] = -1
    found = []
    for checkpoint in (False, True):
        model = GPT(weights, alone(config, mask, 9), positions, checkpoint, linear)
        gradients, parts = Parameters(config, np.ones(config.parameters)), []
        model.loss(tokens, targets, 8, gradients, parts.append)
        found.append(gradients.flat.tobytes())
        ends = [(x.start, x.stop) for x in parts]
        assert ends[0][1] == config.parameters and ends[-1][0] == 0
        assert all(a[0] == b[1] for a, b in zip(ends, ends[1:]))
    assert found[0] == found[1]
    for part_name, part in weights.named.items():
        flat, slope = part.reshape(-1), gradients.named[part_name].reshape(-1)
        for i in rng.integers(0, len(flat), 4):
            both, value = [], flat[i]
            for step in (1e-6, -1e-6):
                flat[i] = value + step
                both.append(model.loss(tokens, targets, 8))
            flat[i] = value
            found = (both[0] - both[1]) / 2e-6
            assert found == pytest.approx(slope[i], abs=1e-8, rel=1e-6), part_name


def test_config():
    assert PRESETS["gpt3-175b"].parameters == pytest.approx(175e9, rel=0.01)
    assert PRESETS["gpt3-125m"].parameters == pytest.approx(125e6, rel=0.02)
    shared = PRESETS["mfa-tiny"]
    assert shared.shapes["h0.qkv.weight"] == (128, (4 + 2) * 64)
    assert shared.shapes["h0.proj.weight"] == (4 * 64, 128)
    assert GPTConfig(**shared.stored) == shared and shared.stored["headdim"] == 64
    assert GPTConfig(**PRESETS["tiny"].stored) == PRESETS["tiny"]
    assert "headdim" not in PRESETS["tiny"].stored  # checkpoints from before have none
    hybrid = [GPTConfig(7, x, 8, 2, 5, layer_pattern="NNNL").hybrid for x in (3, 4)]
    assert hybrid == [False, True]
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
    rates = [learning_rate(x, 1.0, 2, 10) for x in (0, 1, 2, 10)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.1])


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


def losses(comm, grid, config, method, dtype, steps, separator):
    """Return the losses of a training run of a small model, its weights, and its bytes.

    The bytes are those of linear layers, by phase and channel.
    """
    options = {"method": method, "dtype": dtype, "separator": separator, "steps": steps}
    options |= {"rate": 3e-3, "seed": 1, "recompute": method == "ring"}
    text, weights = Text(ROOT / "LICENSE", separator), initial(config, 0, dtype)
    trainer = trainer_of(comm, grid, config, text, weights, **options)
    found = np.array([trainer.step() for _ in range(steps)])
    linear = trainer._training.linear
    traffic = dict(linear.traffic.bytes) if linear else {}
    trainer.free()
    return found, weights, traffic


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("dtype, bound, steps, separator", [
    pytest.param("float32", 1e-5, 20, b"", marks=DEEPER), ("float64", 1e-10, 8, b" "),
])  # fmt: skip
def test_same_losses(comm, grid_of, dtype, bound, steps, separator):
    """Losses on any grid and ring are those of one rank, and all ranks have equal weights."""
    config = GPTConfig(256, 2, 12, 6, 61, nheads_kv=2)
    run = dtype, steps if comm.size in (4, 6) else 4, separator
    expected, *_ = losses(MPI.COMM_SELF, lone(), config, "attention2d", *run)
    shapes = [(r, comm.size // r) for r in range(1, comm.size + 1) if comm.size % r == 0]
    plans, bad = [*product(["attention2d"], shapes), ("ring", (comm.size, 1))], []
    for method, shape in [("attention2d", (2, 3))] if comm.size == 6 else plans:
        grid = grid_of(*shape)
        found, weights, _ = losses(comm, grid, config, method, *run)
        error = np.abs(found / expected - 1).max()
        if not error <= bound:
            bad.append(f"{method} on {shape}: {error:.1e}")
        if len(set(comm.allgather(weights.tobytes()))) > 1:
            bad.append(f"{method} on {shape}: weights differ")
    assert expected[-1] < expected[0]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_same_losses_of_a_hybrid(comm, grid_of):
    """Losses are one rank's; the bytes of the linear layers are those of their states."""
    config = GPTConfig(256, 4, 16, 2, 61, layer_pattern="LLLN")
    run = config, "attention2d", "float32", 8, b""
    expected, *_ = losses(MPI.COMM_SELF, lone(), *run)
    found, _, traffic = losses(comm, grid_of(1, comm.size), *run)
    error = np.abs(found / expected - 1).max()
    # Zigzag: two states of 2 heads of 8 x 8 float32 numbers, in 3 layers and 8 steps.
    sent = 3 * 8 * (comm.size - 1) * 2 * 2 * 8 * 8 * 4
    counted = int(traffic["forward", "all"][0]) if comm.size > 1 else 0
    right = error <= 1e-5 and counted == sent and expected[-1] < expected[0]
    assert_all(comm, right, f"losses differ by {error:.1e}; {counted} bytes, not {sent}")


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


def test_driver_of_hybrid_models(tmp_path):
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
