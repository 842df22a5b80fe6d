"""A wrong argument on any rank is the same error on all ranks at once; nothing hangs."""

import re
import resource

import numpy as np
import pytest
from helpers import assert_all
from mpi4py import MPI
from refused import GOOD, assert_raises, message_of

from a2d_mpi import Attention2D, Causal, Full, IntervalMask, LinearAttention, ProcessGrid
from a2d_mpi.attention.methods import make_plan, plan_class
from a2d_mpi.schedules.method import METHODS, Method
from a2d_mpi.schedules.steps import Rows

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size


# Arguments of grids; what is missing is one row of all ranks.
GRIDS = [
    *[((x, y), {}, f"{x} x {y} grid does not fit {SIZE} ranks")
      for x, y in ((1, 0), (0, 1), (-1, -1), (2, 7), (1, 3)) if x * y != SIZE],
    ((1, 1, 0), {}, "grid does not fit"),
    *[(x, {}, f"rows, cols and heads must be 3 integers, got {(*x, 1)[:3]!r}")
      for x in (("1", 1), (None, 1), (1, 1.0), (1, 1, 2.0), (1, "u", 1))],
    ((1, SIZE, 1, "rcx"), {}, "order must be a permutation of 'rcu'"),
    ((), {"block": (1, 7)}, "1x7 blocks do not divide a grid of 1 x "),
    ((), {"block": "2x2"}, "block must be 2 integers, got '2x2'"),
    ((), {"block": (1, 1.0)}, "block must be 2 integers, got (1, 1.0)"),
    ((), {"nodes": [0] * 7}, " integers, got [0, 0, 0, 0, 0, 0, 0]"),
    ((), {"nodes": [[1], [2, 3]]}, "nodes must be "),
]  # fmt: skip


@pytest.mark.parametrize("shape, options, text", GRIDS, ids=str)
@pytest.mark.parametrize("where", ["all", "last"])
def test_grid(comm, shape, options, text, where):
    if where == "last" and comm.rank != comm.size - 1:
        shape, options = (), {}
    assert_raises(comm, text, ProcessGrid, comm, *(shape or (1, comm.size)), **options)


@pytest.mark.parametrize("make", [Attention2D, LinearAttention])
def test_what_is_no_grid(comm, make):
    for grid in (None, Causal(), comm):
        told = f"^grid must be a ProcessGrid, got {type(grid).__name__}$"
        with pytest.raises(ValueError, match=told):
            make(grid, Causal(), **GOOD)


@pytest.mark.parametrize("make", [Attention2D, LinearAttention])
def test_freed_grid(comm, make):
    grid = ProcessGrid(comm, 1, comm.size)
    plan = make(grid, Causal(), seqlen=40, nheads=4, headdim=8)
    shard = np.zeros((len(plan.tokens), 4, 8), np.float32)
    grid.free()
    for action in (
        lambda: make(grid, Causal(), seqlen=40, nheads=4, headdim=8),
        lambda: plan.forward(shard, shard, shard),
    ):
        assert message_of(comm, action) == "the grid was freed"


# What a plan refuses; the numbers that a configuration refuses are in tests/unit/test_cost.py.
WRONG = [
    ({"seqlen": 2**31, "nheads": 4096, "headdim": 4096}, "GiB, but its node has"),
    ({"nheads_kv": 3}, "nheads_kv must divide nheads, got 3 and 4"),
    ({"softmax_scale": 10**400}, "int too large"),
    ({"distribution": "no such"}, "no such"),
    ({"kernel": "fast"}, "fast"),
    ({"overlap": "thread"}, "overlap must be true or false, got 'thread'"),
    ({"threads": 0}, "threads must be a positive integer, got 0"),
    ({"kernel": "cudnn"}, "kernel 'cudnn' computes float16, bfloat16, got float32"),
    ({"wire": "fp8"}, "wire must be None or one of"),
    ({"slices": 0}, "slices must be a positive number, or two, got 0"),
    ({"slices": (1, 2, 3)}, "got (1, 2, 3)"),
    ({"slices": 3}, "cannot cut the "),
    ({"mask": "causal"}, "mask must be a Mask such as Causal(), got 'causal'"),
    ({"mask": np.ones((40, 40), bool)}, "got array([[ True...hape=(40, 40))"),
    ({"mask": IntervalMask(np.arange(3), np.arange(3))}, "of 3 queries, but the sequence has 40"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, text", WRONG)
@pytest.mark.parametrize("where", ["all", "last"])
def test_plan(comm, grid, wrong, text, where):
    here = where == "all" or comm.rank == comm.size - 1
    common = {"method"} | ({"dtype", "headdim_v"} if "kernel" in wrong else set())
    given = wrong if here else {x: wrong[x] for x in wrong if x in common}
    config = {"method": "attention2d", "grid": grid, "mask": Full(), **GOOD, **given}
    found = message_of(comm, lambda: make_plan(**config))
    assert text in found, found
    if where == "last" and comm.size > 1:
        assert f"on rank {comm.size - 1}" in found


@pytest.mark.parametrize("options, text", [
    ({"mask": Full()}, "a triangle needs a causal mask, got Full"),
    ({"seqlen_kv": 9}, "as many keys as queries, got 40 queries and 9"),
    ({"distribution": "zigzag"}, "needs the triangle distribution, got zigzag"),
    *[({}, f"share the heads), such as 3 or 6, got {SIZE}")] * (SIZE in (4, 5)),
])  # fmt: skip
def test_triangle(comm, grid, options, text):
    given = {"mask": Causal(), **GOOD, **options}
    assert_raises(comm, text, make_plan, "triangle", grid, **given)


LONGER = IntervalMask(np.zeros(40, int), np.arange(40) + 1 + (np.arange(40) == 7))


@pytest.mark.multirank
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name, value, other", [
    ("seqlen", 41, 40), ("nheads", 8, 4), ("headdim", 16, 8), ("nheads_kv", 2, 4),
    ("dtype", "float64", "float32"), ("distribution", "striped", "contiguous"),
    ("softmax_scale", 0.5, 1 / 8**0.5), ("kernel", "numpy", "auto"), ("overlap", False, True),
    ("logit_softcap", 2.0, 3.0), ("wire", "mxfp4", "mxfp8"),
    ("slices", (2, 2), (1, 1)), ("rows", 1, SIZE), ("nodes", tuple(range(SIZE)), (0,) * SIZE),
    ("mask", LONGER, IntervalMask(LONGER.begin, np.arange(40) + 1)),
])  # fmt: skip
def test_ranks_that_disagree(comm, grid, name, value, other):
    mine = {name: value if comm.rank == 2 else other}
    config = {"method": "double ring", "grid": grid, "mask": Full(), **GOOD}
    config |= {"distribution": "contiguous"}
    if name == "rows":
        text = message_of(comm, lambda: ProcessGrid(comm, mine[name], comm.size // mine[name]))
    elif name == "nodes":
        text = message_of(comm, lambda: ProcessGrid(comm, 1, comm.size, **mine))
    else:
        text = message_of(comm, lambda: make_plan(**config | mine))
    told = f"ranks disagree on {name}: {other} on rank 0, {value} on rank 2"
    if name == "mask":
        assert "ranks disagree on mask: IntervalMask (digest" in text and "rank 2" in text
    else:
        assert text == told


@pytest.mark.multirank
def test_heads_that_ranks_cannot_share(comm, grid_of):
    text, sizes = "does not divide 7 heads", GOOD | {"nheads": 7}
    assert_raises(comm, text, Attention2D, grid_of(1, 1, comm.size), Full(), **sizes)
    text, sizes = "cannot cut the 1 KV heads of a rank into 2", GOOD | {"nheads_kv": 1}
    assert_raises(comm, text, make_plan, "ring", grid_of(1, comm.size), Full(), slices=2, **sizes)


class Unwilling(Full):
    """A mask that raises on the last rank only, for its last queries."""

    def __init__(self, error, rank, size):
        self.error, self.last = error, rank == size - 1

    def visible(self, q_tokens):
        if self.last and 39 in q_tokens:
            raise self.error
        return super().visible(q_tokens)


@pytest.mark.parametrize("error", [IndexError("beyond"), MemoryError(), ZeroDivisionError("no")])
def test_mask_that_raises_on_one_rank(comm, grid, error):
    mask = Unwilling(error, comm.rank, comm.size)
    assert_raises(comm, str(error) or "MemoryError", Attention2D, grid, mask, **GOOD)


def test_interrupted_plan_refuses_to_go_on(comm):
    own = ProcessGrid(comm, 1, comm.size)
    plan = Attention2D(own, Full(), **GOOD)
    x = [np.ones((len(plan.tokens), 4, 8), np.float32) for _ in range(3)]

    def fail(*_, **options):
        raise RuntimeError("in the kernel")

    plan.forward(*x)
    forward, plan._state.kernel.forward = plan._state.kernel.forward, fail
    with pytest.raises(RuntimeError, match="in the kernel"):
        plan.forward(*x)
    plan._state.kernel.forward = forward
    assert_raises(comm, "make a new grid and a new plan", plan.forward, *x)


# Of calls: an argument, what stands for it, and what is said.
ARRAYS = [
    ("v", lambda x: x[:, :2], "v has shape "), ("v", lambda x: x[:, :2], ", 2, 8)"),
    ("v", lambda x: x.astype(float), "dtype float64"), ("v", np.ndarray.tolist, "v must be "),
    ("v", lambda x: np.ma.masked_array(x, x > 0), "Masked"),
    ("sink", lambda x: x[:3],
     "sink has shape (3,) and dtype float32, but this plan needs (4,) and float32"),
    ("sink", lambda x: x.astype(float), "sink has shape (4,) and dtype float64"),
    ("sink", np.ndarray.tolist, "sink "), ("lse", lambda x: x[:, :3], "lse "),
    ("dlse", lambda x: x[:, :3], ", 3) and dtype float32, but this shard needs"),
    ("dlse", lambda x: x.astype(float), "and dtype float64, but this shard needs"),
    ("dlse", np.ndarray.tolist, "dlse "),
]  # fmt: skip
DISAGREE = [
    ("sink", lambda x: None, "ranks disagree on the sink"),
    ("dlse", lambda x: None, "ranks disagree on dlse: some ranks pass it, others do not"),
    ("_recorded", lambda x: True, "ranks disagree on gradients (torch.no_grad, requires_grad)"),
]


@pytest.mark.parametrize("where", ["all", "last"])
def test_arrays(comm, grid, where):
    """A wrong argument of a call is one error on all ranks, and the plan still works."""
    here = where == "all" or comm.rank == comm.size - 1
    plan, sink = Attention2D(grid, Full(), **GOOD), np.zeros(4, np.float32)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    out, lse = plan.forward(x, x, x, sink)
    good = {"v": x, "sink": sink, "_recorded": False}
    rest = {"lse": lse, "dlse": np.zeros_like(lse)}
    for name, wrong, text in ARRAYS + DISAGREE * (comm.size > 1 and where == "last"):
        given = good | rest
        given[name] = wrong(given[name]) if here else given[name]
        if name in good:
            assert_raises(comm, text, plan.forward, x, x, **{y: given[y] for y in good})
        else:
            stats = given["lse"], sink
            assert_raises(comm, text, plan.backward, *[x] * 4, out, *stats, dlse=given["dlse"])
    out, lse = plan.forward(x, x, x, sink)
    one = 40 * np.exp(8**0.5)
    assert_all(comm, np.allclose(out, one / (one + 1)), "wrong")
    dq, *_ = plan.backward(x, x, x, x, out, lse, sink, dlse=rest["dlse"])
    assert_all(comm, np.isfinite(dq).all(), "the plan is spoilt")


@pytest.mark.multirank
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("owners, told", [
    ((0, 2), "one run of rows, got 2 runs of 'all kv'"),
    ((2, 0), "consecutive keys of 'all kv' in the order of tokens"),
])  # fmt: skip
def test_calls_that_no_kernel_can_take(comm, grid_of, monkeypatch, owners, told):
    """A plan refuses keys that are no run of memory and no run of tokens, and no rank hangs."""

    def write(p):
        q, out = p.own("own q", "q", "given"), p.own("out", "out", "result")
        pieces = [(owner, p.group.all_places(True, owner)) for owner in (2, 1, 0)]
        array = p.array("all kv", "kv", pieces)
        p.attend(q, Rows(array, tuple(y for x in owners for y in p.rows(array, x).runs)), out)

    bad = Method(write, write, lambda layout: (1, layout.positions))
    monkeypatch.setitem(METHODS, "bad", bad)
    with pytest.raises(ValueError, match=told):
        plan_class("bad")(grid_of(1, comm.size), Full(), seqlen=61, nheads=2, headdim=4)


def test_too_large_for_the_memory(comm, grid, monkeypatch):
    """A plan over the limit of one rank's address space is refused on all; a small one is made."""
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (7 << 26, 7 << 26))
    sizes = {"nheads": 8, "headdim": 128}
    Attention2D(grid, Causal(), seqlen=64, **sizes)
    large = {"seqlen": comm.size << 15, **sizes}  # q, k, v and out of a rank: half a GiB
    told = message_of(comm, lambda: Attention2D(grid, Causal(), **large))
    numbers = re.search(r"tensors and buffers of one rank take (\S+) GiB, but .* 0.4375 GiB", told)
    assert_all(comm, numbers and 0.5 < float(numbers[1]) < 4, told)
