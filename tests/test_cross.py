"""Cross-attention: queries and keys of two sequences, each with its own distribution."""

from functools import cache

import numpy as np
import pytest
from cases import accounts
from dense import TENSORS, plain
from helpers import DEEPER, assert_all, distance

from a2d_mpi import Attention2D, Causal, Full
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.masks.mask import IntervalMask
from a2d_mpi.masks.windows import SlidingWindow

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]
NHEADS, NHEADS_KV, HEADDIM = 4, 2, 8


def random_mask(n, m):
    ends = np.sort(np.random.default_rng(n + m).integers(-3, m + 1, (2, n)), axis=0)
    return IntervalMask(*ends.clip(0))


@cache
def inputs(n, m):
    rng = np.random.default_rng(n * m)
    shapes = (n, NHEADS), (m, NHEADS_KV), (m, NHEADS_KV), (n, NHEADS)
    return [rng.standard_normal((*shape, HEADDIM)) for shape in shapes]


def exact(mask, n, m):
    """Compute float64 results head by head; row i of a causal mask sees keys up to i + m - n."""
    return plain(inputs(n, m), mask.dense(np.arange(n), np.arange(m)), HEADDIM**-0.5)


@pytest.mark.parametrize("mask, lengths", [
    ("full", (61, 18)), ("causal", (23, 57)), ("window", (3, 40)), ("intervals", (40, 2)),
    *(pytest.param(*x, marks=DEEPER) for x in (
        ("full", (3, 40)), ("causal", (40, 2)), ("window", (61, 18)), ("intervals", (23, 57)),
    )),
])  # fmt: skip
def test_results(comm, grid_of, mask, lengths):
    """Every method equals float64, with causal masks aligned bottom-right."""
    n, m = lengths
    bottom_right = np.arange(n) + m - n
    given, aligned = {
        "full": (Full(), Full()),
        "causal": (Causal(), IntervalMask(np.zeros(n, int), (bottom_right + 1).clip(0))),
        "window": (
            SlidingWindow(5, 0),
            IntervalMask((bottom_right - 5).clip(0), (bottom_right + 1).clip(0)),
        ),
        "intervals": (random_mask(n, m), random_mask(n, m)),
    }[mask]
    expected, bad = exact(aligned, n, m), []
    shapes = [(1, comm.size), (comm.size, 1)]
    if comm.size % 2 == 0:
        shapes += [(2, comm.size // 2), (1, comm.size // 2, 2)]
    for shape in shapes:
        grid = grid_of(*shape, nodes=[p // 2 for p in range(comm.size)])
        for method, names in (
            ("attention2d", (None, None)),
            ("ring", ("contiguous", "zigzag")),
            ("double ring", ("zigzag", "striped")),
            ("attention2d", ("striped", "balanced")),
            ("node aware", ("zigzag", "contiguous")),
        ):
            sizes = {"seqlen": n, "seqlen_kv": m, "nheads": NHEADS, "headdim": HEADDIM}
            sizes |= {"nheads_kv": NHEADS_KV, "dtype": "float64", "distribution": names}
            plan = make_plan(method, grid, given, **sizes)
            q, k, v, dout = inputs(n, m)
            q, dout = (x[plan.tokens] for x in (q, dout))
            k, v = (x[plan.tokens_kv] for x in (k, v))
            out, lse = plan.forward(q, k, v)
            found = dict(zip(TENSORS, (out, lse, *plan.backward(dout, q, k, v, out, lse))))
            for name, x in found.items():
                rows = plan.tokens_kv if name in ("dk", "dv") else plan.tokens
                error = distance(x, expected[name][rows])
                if not error <= 1e-12:
                    bad.append(f"{name} of {method} on {shape}: {error:.1e}")
            bad += accounts(plan, True)
    assert_all(comm, not bad, "; ".join(bad))


def test_alignment_matters(comm):
    """A causal mask that is not aligned gives other results."""
    n, m = 23, 57
    wrong = IntervalMask(np.zeros(n, int), np.arange(n) + 1)
    right = IntervalMask(np.zeros(n, int), np.arange(n) + m - n + 1)
    assert distance(exact(wrong, n, m)["out"], exact(right, n, m)["out"]) > 1e-3


def test_bad_input(comm, grid_of):
    grid = grid_of(1, comm.size)
    sizes = {"seqlen": 8, "nheads": 4, "headdim": 8}
    for method, mask, options, text in (
        ("attention2d", Full(), {"distribution": ("zigzag",)}, "must be one name or two"),
        ("attention2d", Full(), {"seqlen_kv": 0}, "seqlen_kv must be a positive integer"),
        (
            "triangle",
            Causal(),
            {"seqlen_kv": 9},
            "needs as many keys as queries, got 8 queries and 9 keys",
        ),
        (
            "attention2d",
            IntervalMask(np.zeros(7, int), np.ones(7, int)),
            {},
            "intervals of 7 queries",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            make_plan(method, grid, mask, **sizes, **options)
    plan = Attention2D(grid, Full(), seqlen_kv=16, **sizes)
    q, k = (np.zeros((n, 4, 8), "f4") for n in (len(plan.tokens), len(plan.tokens_kv) + 1))
    with pytest.raises(ValueError, match="k has shape"):
        plan.forward(q, k, k)
