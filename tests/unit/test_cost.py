"""Bytes and messages of the schedules, against the closed forms of the papers."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import messages_of

from a2d_mpi import Causal, Full, IntervalMask
from a2d_mpi.comm import transport
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import MAX_MESSAGE, flops, misfit
from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.planning import cost
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.writing import problem_of
from a2d_mpi.sharding.distribution import FORMULAS, Distribution
from a2d_mpi.sharding.pairs import pairs_of_runs

N, H, HKV, D = 24, 6, 2, 16


def with_counts(counts, nheads=H, nheads_kv=HKV, dtype="float32", headdim=D, mask=None):
    sizes = max(1, sum(counts)), nheads, headdim, nheads_kv
    ends = np.cumsum([0, *counts]).tolist()
    runs = tuple((range(a, b),) for a, b in zip(ends, ends[1:]))
    shards = Distribution("balanced", sum(counts), len(counts), listed=runs)
    seen = compile_mask(mask or Full(), sizes[0], sizes[0])
    return Problem(AttentionConfig(*sizes, dtype=dtype), shards, shards, seen)


def test_config():
    """Configurations of equal numbers are equal, whatever types the numbers have."""
    config = AttentionConfig(np.int64(7), 6, 16, 2, dtype=np.dtype("float16"))
    assert config == AttentionConfig(7, 6, 16, 2, dtype="float16", softmax_scale=0.25)
    assert hash(config) == hash(AttentionConfig(7, 6, 16, 2, dtype="float16"))
    assert config.arguments | {"seqlen_kv": 7, "headdim_v": 16} == config.arguments
    assert (config.nbytes("q"), config.nbytes("dk", True), config.nbytes("lse")) == (192, 128, 24)


@pytest.mark.parametrize("bad, told", [
    ({"seqlen": 0}, "seqlen must be a positive integer, got 0"),
    ({"seqlen": 4.0}, "got 4.0"),
    ({"seqlen_kv": 0}, "seqlen_kv must be a positive integer"),
    ({"nheads": True}, "nheads must be a positive integer, got True"),
    ({"headdim": 10**20}, "headdim must be at most 65536, got 100000000000000000000"),
    ({"nheads_kv": 4}, "nheads_kv must divide nheads, got 4 and 6"),
    *[({"dtype": x}, "dtype must be one of") for x in ("int8", "no such", None, "f4,(")],
    ({"softmax_scale": np.inf}, "softmax_scale must be finite, got inf"),
    ({"softmax_scale": "a"}, "softmax_scale must be a number, got 'a'"),
    ({"softmax_scale": np.nan}, "nan"),
    ({"logit_softcap": 0}, "logit_softcap must be between 1e-30 and 1e30, got 0"),
    ({"logit_softcap": -30.0}, "logit_softcap must be between 1e-30 and 1e30, got -30.0"),
    ({"logit_softcap": np.inf}, "got inf"),
    ({"logit_softcap": np.nan}, "got nan"),
    ({"seqlen": 1 << 31, "headdim": 1 << 16}, "q, k and v of one rank take"),
])  # fmt: skip
def test_bad_configs(bad, told):
    with pytest.raises(ValueError, match=told):
        AttentionConfig(**{"seqlen": 7, "nheads": 6, "headdim": 16, **bad}).check_room(1)


@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 4), (4, 1), (2, 3)])
def test_even_grid(rows, cols):
    """Bytes sent and received with wide keys equal the formula, and so does the lower bound."""
    n, h, hkv, d, e = 10, 6, 2, 24, 16
    layout = Layout(rows, cols)
    config = AttentionConfig(n * rows * cols, h, d, hkv, dtype="bfloat16", headdim_v=e)
    sizes = problem_of("attention2d", layout, config, Full())
    q, kv = 2 * h * d, 2 * hkv * (d + e)  # bytes of a token
    out, statistics, sums = 2 * h * e, 4 * h, 2  # partial gradients are float32
    for rank in range(layout.size):
        expected = {
            ("forward", "row"): (cols - 1) * n * (q + out + statistics),
            ("forward", "col"): (rows - 1) * n * kv,
            ("backward", "row"): (cols - 1) * n * (q + out + 2 * statistics + sums * q),
            ("backward", "col"): (rows - 1) * n * (kv + sums * kv),
        }
        found = cost.traffic("attention2d", layout, sizes, rank)
        assert found == {key: [x, x] for key, x in expected.items() if x}
    # As many keys as queries would cost most: 2 sqrt(a b A) - (a + b) n.
    area = 360 * n
    for backward, a, b in ((False, q + out, kv), (True, 2 * q + out, 2 * kv)):
        exact = 2 * (a * b * area) ** 0.5 - (a + b) * n
        assert abs(cost.lower_bound(sizes, area, n, backward) - exact) < 1e-9 * exact


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_ring_of_equal_parts(ranks):
    for rank in range(ranks):
        moved = cost.traffic("ring", Layout(ranks, 1), with_counts((N,) * ranks), rank)
        if ranks == 1:
            assert moved == {}
            continue
        assert moved["forward", "ring"] == [4 * 2 * (ranks - 1) * N * HKV * D] * 2
        assert moved["backward", "ring"] == [4 * 2 * 2 * (ranks - 1) * N * HKV * D] * 2


@pytest.mark.parametrize("outer, inner", [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_double_ring(outer, inner):
    """Blocks of uneven ranks; dK and dV start at the second rank of a round."""
    counts = (3, 0, 5, 2, 9, 1)[: outer * inner]
    sizes = with_counts(counts, dtype="bfloat16")
    kv_bytes, dkv_bytes = (2 * sizes.config.nbytes("k", wide) for wide in (False, True))
    for rank in range(outer * inner):
        double = cost.traffic("double ring", Layout(outer, inner), sizes, rank)
        # The blocks that I begin with: each goes to the next ring in each pass, the last home.
        mine = sum(counts[rank % inner :: inner])
        kv, dkv = mine - counts[rank], mine * (outer > 1)
        if inner == 1:  # one ring, whose first gradients come from the second rank
            dkv -= counts[rank - 1]
        before = sum(counts[(rank - 1) % inner :: inner])
        around, dkv_around = ((sum(counts) - x) * (inner > 1) for x in (mine, before))
        for phase, x, y in (
            ("forward", kv * kv_bytes, around * kv_bytes),
            ("backward", kv * kv_bytes + dkv * dkv_bytes,
             around * kv_bytes + dkv_around * dkv_bytes),
        ):  # fmt: skip
            expected = {"ring": x + y} if min(outer, inner) == 1 else {"outer": x, "inner": y}
            assert {key[1]: z[1] for key, z in double.items() if key[0] == phase} == expected
        single = cost.traffic("ring", Layout(outer * inner, 1), sizes, rank)["forward", "ring"][1]
        assert sum(z[1] for key, z in double.items() if key[0] == "forward") == single


def test_exchange_of_heads():
    """A rank sends everything that it owns except its own share of the heads."""
    sizes = with_counts((N,) * 4, 8, 4, "bfloat16")
    for rank in range(4):
        moved = cost.traffic("attention2d", Layout(1, 1, 4), sizes, rank)
        q, kv, lse = 3 * N * 2 * D * 2, 3 * N * 2 * D * 2, 3 * N * 2 * 4
        assert moved["forward", "head"] == [2 * q + kv + lse] * 2
        assert moved["backward", "head"] == [3 * q + 2 * lse + 2 * kv] * 2
    # One kv head for four layers: all get it, and its gradients come back in the compute dtype.
    shared = with_counts((N,) * 4, 8, 1, "bfloat16")
    moved = cost.traffic("attention2d", Layout(1, 1, 4), shared, 0)
    assert moved["forward", "head"][0] == 2 * q + 3 * N * 2 * D * 2 + lse
    assert moved["backward", "head"][0] == 3 * q + 2 * lse + 3 * N * 2 * D * (2 + 4)


@pytest.mark.parametrize("nheads, nheads_kv, heads, fits", [
    (12, 12, 4, True), (12, 12, 5, False), (12, 4, 4, True), (12, 4, 12, True),
    (12, 4, 6, False), (12, 2, 4, True), (12, 1, 3, True), (96, 8, 64, False),
])  # fmt: skip
def test_which_head_axes_fit(nheads, nheads_kv, heads, fits):
    assert (misfit(nheads, nheads_kv, heads) is None) == fits
    sizes = with_counts((1,) * heads, nheads, nheads_kv)
    if not fits:
        with pytest.raises(ValueError, match=str(nheads)):
            sizes.cp_group(heads)
        return
    # What design says: part u reads the kv heads from the one of its first query head to the last.
    group = nheads // nheads_kv
    for u in range(heads):
        first, last = (u * nheads // heads) // group, ((u + 1) * nheads // heads - 1) // group
        assert last - first + 1 == sizes.config.cp_group(heads).nheads_kv


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("order", ["rcu", "ucr", "cur"])
def test_layout(name, order):
    layout = Layout(2, 3, 4, order)
    assert sorted(layout.world_ranks()) == list(range(24))
    whole, cells = Distribution(name, 101, 24, 4), Distribution(name, 101, 6)
    for cell in range(6):
        parts = [whole.tokens(4 * cell + u) for u in range(4)]
        # The parts of its ranks are together the part of the cell.
        assert np.array_equal(np.sort(np.concatenate(parts)), cells.tokens(cell))
    # The fastest axis joins neighbours.
    stride = {"r": 12, "c": 4, "u": 1}[order[-1]]
    assert layout.world_ranks()[stride] == layout.world_ranks()[0] + 1
    with pytest.raises(ValueError, match="permutation"):
        Layout(1, 1, 1, "rru")


@pytest.mark.parametrize("order", ["rcu", "cru", "urc"])
def test_blocks(order):
    """Consecutive ranks fill a block, row by row, and then the next block."""
    layout = Layout(4, 6, 2, order, (2, 3))
    ranks = np.argsort(layout.world_ranks()).reshape(-1, 2, 3)  # by block
    r, c, u = ranks // 12, ranks // 2 % 6, ranks % 2
    assert (r - r[:, :1, :1] == [[0], [1]]).all() and (c - c[:, :1, :1] == [0, 1, 2]).all()
    assert not (r[:, 0, 0] % 2).any() and not (c[:, 0, 0] % 3).any()
    assert (u == u[:, :1, :1]).all()
    second = {"r": r, "c": c, "u": u}[order[-1]][1, 0, 0]
    assert second == {"r": 2, "c": 3, "u": 1}[order[-1]]
    node = layout.on_nodes(np.arange(48) // 6 + 100).nodes
    assert node[:6] == (0, 1, 0, 1, 0, 1) if order != "urc" else node[0] == node[2] == node[14]
    assert Layout(2, 2).on_nodes([7, 5, 3, 1]) == Layout(2, 2)
    for block in ((3, 3), (2, 0), (8, 6)):
        with pytest.raises(ValueError, match="blocks do not divide a grid of 4 x 6"):
            Layout(4, 6, 1, order, block)


@given(st.sampled_from(FORMULAS), st.integers(1, 60), st.integers(1, 7), st.sampled_from("fcw"))
def test_areas(name, seqlen, parts, kind):
    parts = {1: 1, 2: 1, 3: 3, 4: 3, 5: 3}.get(parts, 6) if name == "triangle" else parts
    tokens = np.arange(seqlen)
    window = IntervalMask(np.maximum(0, tokens - 5), tokens + 1)
    mask = {"f": Full(), "c": Causal(), "w": window}[kind]
    distribution = Distribution(name, seqlen, parts)
    runs = [list(distribution.runs(x)) for x in range(parts)]
    shards = [distribution.tokens(x) for x in range(parts)]
    found = pairs_of_runs(mask, list(product(runs, runs)))  # all at once
    for (q, k), (area, cut) in zip(product(shards, shards), found.T.tolist()):
        assert area == mask.area(q, k)
        if name not in ("zigzag", "triangle"):  # whose shards are several runs
            seen = sum(end - begin for begin, end in mask.intervals(q, k))
            assert cut == np.sum((seen > 0) & (seen < len(k)))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("nheads_kv", [1, 2, 6])
@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_lower_bound_of_all_choices(mask, nheads_kv, backward):
    """The bound holds for every choice of queries and keys of a rank, with six tokens."""
    sets = np.array(list(product([False, True], repeat=6)))
    queries, keys = np.arange(6)[:, None], np.arange(6)
    visible = keys <= queries if isinstance(mask, Causal) else np.ones((6, 6), bool)
    areas = sets.astype(int) @ visible @ sets.T
    tight = False
    for tokens in (1, 2, 3):
        problem = with_counts((tokens,), 6, nheads_kv, mask=mask)
        q, kv = problem.config.nbytes("q"), 2 * problem.config.nbytes("k")
        costs = (3 * q, 2 * kv) if backward else (2 * q, kv)
        bounds = [cost.lower_bound(problem, x, tokens, backward) for x in range(37)]
        for own in sets[sets.sum(axis=1) == tokens]:
            moved = (sets & ~own).sum(axis=1)
            nbytes = costs[0] * moved[:, None] + costs[1] * moved
            least = np.array(bounds)[areas]
            assert (nbytes >= least - 1e-6).all()
            tight |= bool(((nbytes < least + 1e-6) & (nbytes > 0)).any())
    assert tight or costs[0] != costs[1]  # for equal costs no bound is larger


def test_messages():
    """Tensors of more bytes than MPI counts are cut."""
    large = with_counts((1 << 20,) * 2, 1, 1, headdim=512)  # 2 GiB a tensor
    assert messages_of("ring", Layout(2, 1), large, 0)["forward", "ring"] == [4, 4]
    assert MAX_MESSAGE == transport.MAX_MESSAGE


def test_no_such_method():
    with pytest.raises(ValueError, match="method must be one of"):
        cost.traffic("ulysses", Layout(1, 1), with_counts((N,)), 0)


def test_flops():
    assert flops(10, H, D) == 4 * 10 * H * D
    assert flops(10, H, D, backward=True) == 10 * 10 * H * D
    assert flops(10, H, D, headdim_v=3) == 2 * 10 * H * (D + 3)
    assert flops(10, H, D, True, 3) == 2 * 10 * H * (3 * D + 2 * 3)
