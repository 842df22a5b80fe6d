"""Linear attention against its definition in float64, its bytes, and its refusals."""

import re
from functools import partial
from itertools import product

import numpy as np
import pytest
from helpers import assert_all, deeper, distance
from oracles import linear_attention
from refused import message_of

from a2d_mpi import Attention2D, Causal, Full, LinearAttention, SlidingWindow
from a2d_mpi.linear.features import FEATURE_MAPS, NORMS

NHEADS, HEADDIM = 3, 8
DECAY = (1.0, 0.9, 0.01)
RESULTS = ("out", "dq", "dk", "dv")
SIZES = {"nheads": NHEADS, "headdim": HEADDIM}


def tensors(seqlen, dtype="float64"):
    """Return q, k, v and dout of the whole sequence."""
    rng = np.random.default_rng(seqlen)
    shape = seqlen, NHEADS, HEADDIM
    return [(rng.standard_normal(shape) + 0.5).astype(dtype) for _ in range(4)]


def exact(seqlen, causal, feature_map, norm, decay, dtype=np.float64, kept="float64"):
    case = causal, feature_map, norm, 1.0 if decay is None else decay, dtype
    return linear_attention(*tensors(seqlen, kept), *case)


def computed(plan, dtype="float64"):
    """Return out and gradients of this rank for whole inputs."""
    q, k, v, dout = (x[plan.tokens] for x in tensors(plan.config.seqlen, dtype))
    out, kept = plan.forward(q, k, v)
    return [out, *plan.backward(dout, q, k, v, out, kept)]


def options(feature_map, norm, decay, **others):
    found = {"feature_map": feature_map, "norm": norm, "decay": decay, "chunk": 8}
    return found | SIZES | others


CASES = [
    (causal, feature_map, norm, decay)
    for causal, feature_map, norm, decay in product(
        (True, False), FEATURE_MAPS, NORMS, (None, DECAY)
    )
    if (feature_map, norm) != ("none", "denominator") and (causal or decay is None)
]


def off(plan, found, wanted, bounds):
    """Describe the results of this rank that are out of bounds."""
    errors = [distance(x, y[plan.tokens]) for x, y in zip(found, wanted)]
    return [
        f"{name}: {error:.2e} > {bound:.2e}"
        for name, error, bound in zip(RESULTS, errors, bounds)
        if not error <= bound
    ]


def test_oracle_differentiates():
    """The oracle's gradients equal central differences along random directions."""
    rng, n, step = np.random.default_rng(0), 12, 1e-6
    for case in CASES:
        q, k, v, dout = tensors(n)
        _, *gradients = exact(n, *case)
        for i, gradient in enumerate(gradients):
            direction = rng.standard_normal(q.shape)
            sums = []
            for sign in (1, -1):
                moved = [q, k, v]
                moved[i] = moved[i] + sign * step * direction
                decay = 1.0 if case[3] is None else case[3]
                out, *_ = linear_attention(*moved, dout, *case[:3], decay)
                sums.append((out * dout).sum())
            slope = (sums[0] - sums[1]) / (2 * step)
            assert slope == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-5), case


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("states", ["gather", "ring"])
@pytest.mark.parametrize("seqlen", deeper([1, 3, 101], (3, 101)))
def test_results_and_bytes(comm, grid, seqlen, states):
    """Results are right for all options, and bytes equal the formula."""
    bad = []
    for i, case in enumerate(CASES):
        causal, *others = case
        chunk = (1, 8, 512)[i % 3]
        for name in ("contiguous",) if seqlen < 100 else ("zigzag",):
            given = {"states": states, "distribution": name, "dtype": "float64", "chunk": chunk}
            given = options(*others, **given)
            plan = LinearAttention(grid, Causal() if causal else Full(), seqlen=seqlen, **given)
            wanted = exact(seqlen, *case)
            bounds = [1e-12 * max(1, distance(x, 0)) for x in wanted]
            wrong = off(plan, computed(plan), wanted, bounds)
            if plan.traffic.bytes != plan.predicted_traffic():
                wrong.append(f"{plan.traffic.bytes} bytes, predicted {plan.predicted_traffic()}")
            bad += [f"{case} {name}: {x}" for x in wrong]
    assert_all(comm, not bad, "; ".join(bad[:5]))


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes(comm, grid, dtype):
    """The error is at most twice that of dense float32 plus a rounding."""
    bad = []
    for case in (
        (True, "elu+1", "denominator", None),
        (True, "none", "output", (1e-30, 0.5, 1.0)),
        (False, "relu", "output", None),
    ):
        given = options(*case[1:], dtype=dtype, distribution="zigzag")
        plan = LinearAttention(grid, Causal() if case[0] else Full(), seqlen=601, **given)
        wanted, narrow = (exact(601, *case, x, kept=plan.dtype) for x in (np.float64, np.float32))
        eps = 2.0**-8 if dtype == "bfloat16" else 2.0**-24
        bounds = [2 * distance(x, y) + 4 * eps * distance(x, 0) for x, y in zip(wanted, narrow)]
        found = computed(plan, plan.dtype)
        bad += [f"{case}: {x}" for x in off(plan, found, wanted, bounds)]
        bad += [f"{case}: {x.dtype}" for x in found if x.dtype != plan.dtype]
    assert_all(comm, not bad, "; ".join(bad))


def test_normalised_outputs_of_large_sums():
    """Squares of the sums overflow in float32, but out is near 1."""
    sums = np.random.default_rng(0).standard_normal((5, NHEADS, HEADDIM))
    root = np.sqrt((sums**2).mean(axis=(1, 2), keepdims=True))  # (5, 1, 1)
    for dtype in ("float32", "float64"):
        out, scale = NORMS["output"].forward((sums * 1e30).astype(dtype))
        assert out.dtype == scale.dtype == dtype
        assert distance(out, sums / root) < 1e-6 and distance(scale * root * 1e30, 1) < 1e-6


@pytest.mark.mpi
@pytest.mark.multirank
def test_bytes_of_any_length(comm, grid):
    """A state is H F (D + 1) numbers, sent P - 1 times, or at most once; N does not count."""
    state = 4 * NHEADS * HEADDIM * (HEADDIM + 1)
    for (states, most), seqlen in product((("gather", comm.size - 1), ("ring", 1)), (64, 333)):
        given = options("elu+1", "denominator", None, states=states)
        plan = LinearAttention(grid, Causal(), seqlen=seqlen, **given)
        computed(plan, "float32")
        sent = max(comm.allgather(plan.traffic.bytes["forward", "all"][0]))
        assert_all(comm, sent == most * state, f"{states}, {seqlen} tokens: {sent} bytes")


@pytest.mark.multirank
@pytest.mark.mpi(min_size=4)
def test_head_axis_and_listed_runs(comm, grid_of):
    """The shape of the grid does not matter; a rank may have many runs of tokens."""
    grid = grid_of(1, comm.size // 2, 2) if comm.size % 2 == 0 else grid_of(comm.size, 1)
    case = True, "relu", "denominator", DECAY
    given = options(*case[1:], distribution="balanced", dtype="float64")
    plan = LinearAttention(grid, Causal(), seqlen=101, **given)
    wanted = exact(101, *case)
    bad = off(plan, computed(plan), wanted, [1e-12 * max(1, distance(x, 0)) for x in wanted])
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
def test_refusals(comm, grid):
    """A bad argument is one ValueError on all ranks, and the grid still works."""
    last = comm.rank == comm.size - 1

    def refused(text, call):
        said = message_of(comm, call, ValueError)
        assert re.search(text, said), said

    for mask, change, match in (
        (SlidingWindow(4), {}, "needs a full or a causal mask, got SlidingWindow"),
        (Full(), {"decay": 0.5}, "a decay needs a causal mask, got Full"),
        (Causal(), {"decay": (0.5, 0.5)}, r"decay must be one number or 3 .*, got shape \(2,\)"),
        (Causal(), {"decay": 1.5}, "decay must be above 0 and at most 1, got 1.5"),
        (Causal(), {"decay": float("nan")}, "decay must be above 0 and at most 1, got nan"),
        (Causal(), {"norm": "denominator"}, "norm 'denominator' needs a feature_map"),
        (Causal(), {"feature_map": "exp"}, "feature_map must be one of .*, got 'exp'"),
        (Causal(), {"states": "tree"}, "states must be one of .*, got 'tree'"),
        (Causal(), {"chunk": 0}, "chunk must be a positive integer, got 0"),
        (Causal(), {"chunk": 513}, "chunk must be at most 512, got 513"),
        (Causal(), {"decay": "x"}, "decay must be one number or 3 numbers, got 'x'"),
        (Causal(), {"distribution": "nosuch"}, "unknown distribution 'nosuch'"),
        (Causal(), {"distribution": 3}, "unknown distribution 3"),
    ):
        usual = {"seqlen": 9, **SIZES}
        wrong = mask, usual | change
        for given in (wrong, wrong if last else (Causal(), usual)):  # on all ranks, and on one
            refused(match, lambda x=given: LinearAttention(grid, x[0], **x[1]))
    make = partial(LinearAttention, grid)
    plan = make(Causal(), seqlen=50, **SIZES)
    q, k, v, dout = (x[plan.tokens] for x in tensors(50, "float32"))
    out, kept = plan.forward(q, k, v)
    other = Attention2D if last else LinearAttention
    cases = [
        ("v has shape", lambda: plan.forward(q, k, v[:, :2] if last else v)),
        ("kept must be the second result of forward",
         lambda: plan.backward(dout, q, k, v, out, None if last else kept)),
    ]  # fmt: skip
    if comm.size > 1:
        cases += [
            ("ranks disagree on decay",
             lambda: make(Causal(), seqlen=9, decay=0.5 if last else 0.25, **SIZES)),
            ("ranks disagree on method: LinearAttention",
             lambda: other(grid, Causal(), seqlen=9, **SIZES)),
            ("needs runs of consecutive tokens, got the striped distribution",
             lambda: make(Causal(), seqlen=50, distribution="striped", **SIZES)),
        ]  # fmt: skip
    for change, got in (({"norm": "none"}, "None"), ({"dtype": "float64"}, "float64")):
        another = make(Causal(), seqlen=50, **SIZES, **change)
        _, wrong = another.forward(*(x.astype(another.dtype) for x in (q, k, v)))
        call = partial(plan.backward, dout, q, k, v, out, wrong if last else kept)
        cases.append((rf"states and scale .*, got .*{got}", call))
    for text, call in cases:
        refused(text, call)
    again, _ = plan.forward(q, k, v)
    assert_all(comm, again.tobytes() == out.tobytes(), "another result after refusals")
