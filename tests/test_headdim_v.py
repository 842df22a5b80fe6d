"""Values of another width than the keys (MLA), against float64; bytes and memory."""

import h5py
import numpy as np
import pytest
from cases import METHODS, NHEADS, OTHERS, SIZE, accounts
from dense import TENSORS, out_of_bounds, problem, wrong_with
from helpers import assert_all, deeper, drive_each, parser_of
from test_bad_input import assert_raises
from test_dlse import HIDDEN, N

from a2d_mpi import (
    Attention2D,
    Causal,
    Documents,
    Full,
    IntervalMask,
    NodeAwareAttention,
    TriangleAttention,
)
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.candidates import read_problem
from a2d_mpi.experiments.results import inspect_input, read_result
from a2d_mpi.kernels import make_kernel
from a2d_mpi.planning import cost
from a2d_mpi.planning.model import predict
from a2d_mpi.schedules import problem_of

NODES = {"nodes": [p // 2 for p in range(SIZE)]}
# Name: the class, the grid, its options, and those of the plan.
PLANS = {
    f"{kind.__name__} {'x'.join(map(str, shape))}": (kind, shape, {}, {})
    for kind, shape in METHODS + OTHERS
}
PLANS["in turn"] = Attention2D, METHODS[0][1], {}, {"overlap": False}
PLANS["node aware"] = NodeAwareAttention, METHODS[-2][1], NODES, {}
if SIZE in (1, 6):
    PLANS["triangle"] = TriangleAttention, (1, SIZE), {}, {}
TOKENS = np.arange(N)
HALF = IntervalMask(
    0 * TOKENS, np.where(TOKENS % 7, TOKENS // 2 + 1, 0)
)  # nobody sees the last keys
# Mask, dtype, KV heads, headdim, headdim_v: as of MLA, trained (192, 128) and absorbed (576, 512).
CASES = (
    (Causal(), "float32", NHEADS, 24, 16), (HIDDEN, "bfloat16", 1, 36, 32),
    (Full(), "float64", 2, 5, 12), (Causal(), "bfloat16", NHEADS, 24, 16),
    (Documents([0, 5, 6, 40, N]), "float32", 1, 36, 32),
)  # fmt: skip


@pytest.mark.mpi
@pytest.mark.grids
@pytest.mark.parametrize("name", PLANS)
def test_plans(comm, grid_of, name):
    kind, shape, of_grid, options = PLANS[name]
    grid, bad = grid_of(*shape, **of_grid), []
    for mask, dtype, nheads_kv, d, e in CASES:
        if kind is TriangleAttention and not isinstance(mask, Causal):
            continue
        plan = kind(
            grid, mask, seqlen=N, nheads=NHEADS, nheads_kv=nheads_kv, headdim=d, headdim_v=e,
            dtype=dtype, **options,
        )  # fmt: skip
        wrong = wrong_with(plan, problem(mask, plan.config)) + accounts(plan, True)
        bad += [f"{dtype} {d} {e}: {x}" for x in wrong]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("dtype, name", [
    ("float32", "numpy"), ("float32", "numba"), ("bfloat16", "numba"), ("float64", "numpy"),
])  # fmt: skip
@pytest.mark.parametrize("widths", deeper([(192, 128), (576, 512), (16, 40)], [(192, 128)]))
def test_kernels(dtype, name, widths):
    """Kernels ignore NaN in masked rows and keys; swapped halves of v fail."""
    (d, e), scale = widths, widths[0] ** -0.5
    nheads_kv = 1 if d == 576 else 3
    config = AttentionConfig(N, NHEADS, d, nheads_kv, headdim_v=e, dtype=dtype)
    inputs, _, _, exact, largest = problem(HALF, config)
    q, k, v, dout = (x.astype(DTYPES[dtype]) for x in inputs)
    intervals = HALF.intervals(TOKENS, TOKENS)
    masked = ~HALF.dense(TOKENS, TOKENS).any(axis=1)
    unseen = ~HALF.dense(TOKENS, TOKENS).any(axis=0)
    assert masked.any() and unseen.any()
    q[masked], dout[masked], k[unseen], v[unseen] = (np.nan,) * 4
    kernel = make_kernel(name, HOST, q.dtype, scale, widths=widths)
    for wrong in (False, True):
        values = np.roll(v, 1, axis=-1) if wrong else v
        out = np.empty(dout.shape, kernel.dtype)
        lse = np.empty(q.shape[:2], kernel.dtype)
        kernel.forward(q, k, values, intervals, out, lse)
        delta = (np.nan_to_num(dout.astype(float)) * exact["out"]).sum(-1).astype(kernel.dtype)
        gradients = [np.empty(x.shape, kernel.dtype) for x in (q, k, v)]
        kernel.backward(
            dout, q, k, values, lse, delta, intervals, *gradients, fresh=True
        )  # fmt: skip
        found = dict(zip(TENSORS, (out, lse, *gradients)))
        assert bool(out_of_bounds(found, exact, largest)) == wrong


def test_bytes_by_formula():
    """Bytes of an even grid equal the formula, and so does the lower bound."""
    rows, cols, n, h, hkv, d, e = 2, 3, 10, 6, 2, 24, 16
    layout = Layout(rows, cols)
    config = AttentionConfig(n * rows * cols, h, d, hkv, dtype="bfloat16", headdim_v=e)
    sizes = problem_of("attention2d", layout, config, Full())
    q, kv = 2 * h * d, 2 * hkv * (d + e)  # bytes of a token
    out, statistics, sums = 2 * h * e, 4 * h, 2  # partial gradients are float32
    for rank in range(layout.size):
        found = cost.traffic("attention2d", layout, sizes, rank)
        assert {x: received for x, (_, received) in found.items()} == {
            ("forward", "row"): (cols - 1) * n * (q + out + statistics),
            ("forward", "col"): (rows - 1) * n * kv,
            ("backward", "row"): (cols - 1) * n * (q + out + 2 * statistics + sums * q),
            ("backward", "col"): (rows - 1) * n * (kv + sums * kv),
        }
    # As many keys as queries would cost most: 2 sqrt(a b A) - (a + b) n.
    area = 360 * n
    for backward, a, b in ((False, q + out, kv), (True, 2 * q + out, 2 * kv)):
        exact = 2 * (a * b * area) ** 0.5 - (a + b) * n
        assert abs(cost.lower_bound(sizes, area, n, backward) - exact) < 1e-9 * exact


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_kernels_on_a_gpu_refuse(comm, grid_of, cupy):
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid = grid_of(1, comm.size)
    sizes = {"seqlen": 40, "nheads": 4, "headdim": 24, "headdim_v": 16, "dtype": "bfloat16"}
    told = "needs headdim_v equal to headdim, got headdim 24 and headdim_v 16"
    for kernel in ("cupy", "cudnn"):
        text = f"kernel '{kernel}' {told}"
        assert_raises(comm, text, Attention2D, grid, Full(), kernel=kernel, **sizes)
    plan = Attention2D(grid, Full(), **sizes)
    q, k, v = (np.zeros((len(plan.tokens), 4, d), DTYPES["bfloat16"]) for d in (24, 24, 16))
    on_gpu = map(cupy.asarray, (q, k, v))
    assert_raises(comm, f"kernel 'cupy' {told}", plan.forward, *on_gpu)
    assert_raises(comm, "v has shape", plan.forward, q, k, k)
    out, _ = plan.forward(q, k, v)  # the plan still works, on the host
    assert_all(comm, out.shape == (len(q), 4, 16), out.shape)


@pytest.mark.launches
def test_drivers(tmp_path):
    """Drivers take an input whose v has another width."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "mla.h5", "w") as file:
        file.attrs.update({"schema": "a2d_mpi input", "schema_version": 1})
        for name, heads, width in (("q", 4, 24), ("k", 2, 24), ("v", 2, 16)):
            file[name] = rng.standard_normal((50, heads, width), np.float32)
    assert inspect_input(tmp_path / "mla.h5").config.headdim_v == 16
    sizes = ["--seqlens", 48, "--nheads", 4, "--headdim", 24, "--headdim-v", 16, "--trials", 1]
    more = ["--backward", "--output"]
    done, found = drive_each(
        [
            ("attention.py", [
                tmp_path / "mla.h5", "--check", "full", "--trials", 1, "--save-outputs", *more,
                tmp_path / "run.h5",
            ], []),
            ("bench.py", ["--plans", "ring", *sizes, *more, tmp_path / "bench.h5"], []),
        ],
        2,
    )  # fmt: skip
    assert [code for code, _ in found] == [0, 0], done.stderr
    assert "headdim 24, headdim_v 16" in found[0][1]
    result = read_result(tmp_path / "run.h5")
    assert result.passed and result.config["headdim_v"] == 16
    shapes = {name: x.shape for name, x in result.outputs.items()}
    assert shapes["out"] == (50, 4, 16) and shapes["dv"] == (50, 2, 16)
    assert shapes["dq"] == (50, 4, 24) and shapes["dk"] == (50, 2, 24)
    with h5py.File(tmp_path / "bench.h5") as file:
        (name,) = file["runs"]
        assert "-d24x16-" in name and file["runs"][name]["config"].attrs["headdim_v"] == 16


def test_planner():
    """Predicted time falls with the width of the values."""
    parser, seconds = parser_of("drivers/plan.py"), []
    problem = "--profile data/machines/h100-8.toml --ranks 4 --seqlen 64K --nheads 8 --backward"
    for width in ("", "--headdim-v 192", "--headdim-v 128"):
        args = parser.parse_args(f"{problem} --headdim 192 {width}".split())
        machine, case = read_problem(args)
        phases = predict(machine, "attention2d", Layout(2, 2), case.work())
        seconds.append([phases[x].total.max() for x in ("forward", "backward")])
    ratios = np.divide(seconds[2], seconds[0])
    assert seconds[0] == seconds[1]
    # Where computing decides: (192 + 128) / (2 192), and (3 192 + 2 128) / (5 192).
    assert np.allclose(ratios, (0.833, 0.867), atol=0.03), ratios
