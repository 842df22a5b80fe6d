"""Random plans against dense float64, and faults of the package that they must find.

    mpiexec -n 6 python -m pytest tests/ranks/test_random.py --with-mpi --hypothesis-seed 7

All ranks draw the same cases: with one seed, and without one from the names of the tests.
"""

import traceback
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from cases import accounts, differing
from dense import Problem, results_of, wrong_in
from hypothesis import given, note, settings
from hypothesis import strategies as st
from mpi4py import MPI
from mutants import MUTANTS
from oracles import Intervals

from a2d_mpi import (
    Causal,
    Documents,
    Full,
    IntervalMask,
    Mask,
    PrefixLM,
    ProcessGrid,
    SlidingWindow,
)
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.core.sizes import misfit
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.sharding import triangle_shards

SIZE = MPI.COMM_WORLD.size
pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi, pytest.mark.multirank, pytest.mark.grids]
METHODS = "attention2d", "node aware", "triangle", "ring", "striped ring", "double ring"
CROSS = "attention2d", "node aware", "ring", "double ring"  # for two sequences
SHAPES = [(r, c, SIZE // r // c) for r in range(1, SIZE + 1) for c in range(1, SIZE + 1)
          if SIZE % (r * c) == 0]  # fmt: skip


class Case(NamedTuple):
    """A plan, what its calls get, and the rows and keys of the blocks of a kernel."""

    method: str
    shape: tuple[int, int, int]
    mask: Mask
    sizes: dict[str, int]
    order: str = "rcu"
    nodes: tuple[int, ...] | None = None
    options: dict[str, object] = {}  # noqa: RUF012
    sink: bool = False
    dlse: bool = False
    blocks: tuple[int, int] = (512, 512)


def several(n, m, number, seed):
    """Return a mask of several intervals of each query, some of them empty."""
    points = np.sort(np.random.default_rng(seed).integers(0, m + 1, (2 * number, n)), axis=0)
    return Intervals(*zip(points[::2], points[1::2]))


def intervals(n, m, seed):
    """Return a mask with intervals that begin and end anywhere, also the wrong way round."""
    return IntervalMask(*np.random.default_rng(seed).integers(-3, m + 4, (2, n)).clip(0, m))


@st.composite
def masks(draw, n, m):
    """Draw a mask of n queries and m keys."""
    token, seed = st.integers(0, n), st.integers(0, 99)
    kinds = [
        st.just(Full()),
        st.builds(intervals, st.just(n), st.just(m), seed),
        st.builds(several, st.just(n), st.just(m), st.integers(2, 4), seed),
    ]
    if n == m:
        ends = st.lists(st.integers(1, n), max_size=5).map(lambda x: [0, *sorted({*x, n})])
        kinds += [
            st.just(Causal()),
            st.builds(SlidingWindow, token, token),
            st.builds(PrefixLM, token),
            st.builds(Documents, ends, st.booleans()),
        ]
    return draw(st.one_of(kinds))


@st.composite
def cases(draw):
    """Draw a case that some plan takes."""

    def pick(*values):
        return draw(st.sampled_from(values))

    rows, cols, heads = shape = pick(*SHAPES)
    method = pick(*(x for x in METHODS if x != "triangle" or triangle_shards.fits(rows * cols)))
    nheads = heads * pick(1, 2, 3, 4)
    group = pick(*(x for x in range(1, nheads + 1)
                   if nheads % x == 0 and not misfit(nheads, nheads // x, heads)))  # fmt: skip
    n = m = draw(st.integers(1, 150))
    if method in CROSS and draw(st.booleans()):
        m = draw(st.integers(1, 150))
    own_kv = max(1, nheads // group // heads)
    options = {
        "dtype": pick("float32", "float64", "bfloat16", "float16"),
        "kernel": pick("auto", "numpy"), "overlap": draw(st.booleans()),
        "slices": pick(*(x for x in range(1, own_kv + 1) if own_kv % x == 0)),
        "logit_softcap": pick(None, 5.0),
    }  # fmt: skip
    if method not in ("striped ring", "triangle"):
        names = None, "contiguous", "zigzag", "striped"
        of_keys = {"distribution": (pick(*names), pick(*names))}
        options |= of_keys if m != n else {"distribution": pick(*names, "balanced")}
    nodes = draw(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE))
    sizes = {"seqlen": n, "nheads": nheads, "nheads_kv": nheads // group}
    sizes |= {"headdim": pick(8, 16, 33, 64)} | ({"seqlen_kv": m} if m != n else {})
    return Case(
        method, shape, Causal() if method == "triangle" else draw(masks(n, m)), sizes,
        pick("rcu", "ruc", "cru", "cur", "urc", "ucr"),
        tuple(nodes) if method == "node aware" else None, options,
        draw(st.booleans()), draw(st.booleans()), (pick(512, 64, 5), pick(512, 64, 7)),
    )  # fmt: skip


def wrong(comm, case):
    """Describe what is wrong with results, bytes, messages and buffers of a case; collective.

    The plan is called with two data sets, and again: 0, 1, 0 would not show two buffers in turn.
    """
    grid = ProcessGrid(comm, *case.shape, order=case.order, nodes=case.nodes)
    defaults = NumpyKernel.__init__.__defaults__
    with patch.object(NumpyKernel.__init__, "__defaults__",
                      (defaults[0], *case.blocks, *defaults[3:])):  # fmt: skip
        plan = make_plan(case.method, grid, case.mask, **case.sizes, **case.options)
        config = replace(plan.config, wire=None)
        data = [Problem(case.mask, config, case.sink, case.dlse, 1.0, seed) for seed in (0, 1)]
        found = [results_of(plan, data[i], data[i].dlse) for i in (0, 1, 1, 0)]
    bad = accounts(plan, True, calls=4)
    bad += differing(found[0], found[3]) + differing(found[1], found[2])
    for x, y in zip(data, found):
        bad += wrong_in(plan, y, x)
    plan.free()
    grid.free()
    return [x for part in comm.allgather(bad) for x in part]


@settings(max_examples=25 if settings.default.derandomize else 100)  # without, and with a seed
@given(cases())
def test_equal_to_float64(comm, case):
    note(str(case))
    try:
        bad = wrong(comm, case)
    except Exception as error:
        print(f"rank {comm.rank}: {case}", flush=True)
        traceback.print_exc()
        comm.Abort(1)  # the others may wait for this rank
        raise error
    assert not bad, bad


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(comm, name):
    """Each fault of a stage shows in one of two plans, which are right without it."""
    n = 151 + 2 * list(MUTANTS).index(name)  # lengths of which nothing is kept
    sizes = {"seqlen": n, "nheads": 12, "nheads_kv": 12, "headdim": 16}
    given = {"sizes": sizes, "options": {"slices": 3, "kernel": "numpy"}}
    masks = Causal(), Documents([0, n // 3, n], causal=True)
    plans = [Case("attention2d", (2, SIZE // 2, 1), x, **given) for x in masks]
    with MUTANTS[name](comm.rank):
        found = [wrong(comm, x) for x in plans]
    assert any(found)
    assert not wrong(comm, plans[0])
