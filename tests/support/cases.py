"""Grids and plans for the tests of distributed attention."""

from dense import problem_for, results_of, wrong_in
from mpi4py import MPI
from oracles import messages_of

from a2d_mpi import (
    Attention2D,
    DoubleRingAttention,
    NodeAwareAttention,
    RingAttention,
    TriangleAttention,
)
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.memory import phases_of
from a2d_mpi.schedules.program import held_bytes

SIZE = MPI.COMM_WORLD.size
NHEADS = 6
GRIDS = {5: [(1, 5)], 6: [(2, 3), (3, 2)]}.get(
    SIZE, [(r, SIZE // r) for r in range(1, SIZE + 1) if SIZE % r == 0]
)
METHODS = [(Attention2D, grid) for grid in GRIDS] + [(RingAttention, GRIDS[-1])]
# With a head axis, the third number; double rings, whose loops are the ring's.
OTHERS = {
    1: [(TriangleAttention, (1, 1)), (DoubleRingAttention, (1, 1))],
    4: [(DoubleRingAttention, (2, 2)), (Attention2D, (2, 1, 2))],
    6: [
        (TriangleAttention, (6, 1)),
        (TriangleAttention, (3, 1, 2)),
        (DoubleRingAttention, (2, 3)),
        (Attention2D, (1, 3, 2)),
        (Attention2D, (1, 1, 6)),
        (DoubleRingAttention, (3, 1, 2)),
    ],
}.get(SIZE, [(DoubleRingAttention, (SIZE, 1))])
# Grids, with heads, and the node of every rank: 1, 2 and 4 ranks a node, and uneven ones.
NODES = {
    1: [((1, 1), (0,))],
    4: [
        ((2, 2), (0, 0, 1, 1)),
        ((2, 2, 1, "rcu", (2, 1)), (7, 7, 7, 7)),
        ((1, 4), (0, 0, 1, 1)),
        ((4, 1), (0, 1, 1, 1)),
        ((1, 2, 2), (0, 1, 0, 1)),
        ((1, 4, 1, "ucr"), (2, 0, 0, 0)),
    ],
    6: [
        ((2, 3), (0, 1, 0, 0, 1, 1)),
        ((1, 6, 1, "rcu", (1, 2)), (0, 0, 0, 0, 1, 1)),
        ((1, 6), (0, 0, 1, 1, 2, 2)),
        ((6, 1), (0, 1, 1, 1, 2, 2)),
    ],
}.get(SIZE, [((1, SIZE), (0, 0, *[1] * (SIZE - 2)))])


def label(method):
    """Return the label of a method and grid in the report of a test."""
    return f"{method[0].__name__}-{'x'.join(map(str, method[1]))}"


# Name: the class, the grid, and its nodes.
PLANS = {label(x): (*x, None) for x in METHODS + OTHERS}
MORE = {
    f"node aware {shape} {nodes}": (NodeAwareAttention, shape, nodes) for shape, nodes in NODES
}
PLANS["node aware"] = MORE.pop(next(iter(MORE)))


def takes(kind, mask):
    """Return True if a class of plans takes a mask."""
    return kind is not TriangleAttention or isinstance(mask, Causal)


def accounts(plan, backward, calls=1):
    """Describe what is wrong with the traffic or the buffers of a plan.

    After so many forward and, if `backward`, backward calls.
    """
    method, rank, bad = plan.method, plan.grid.comm.rank, []
    sizes = method, plan.layout, plan.problem, rank
    phases = ("forward", "backward") if backward else ("forward",)
    for what, counted, expected in (
        ("bytes", plan.traffic.bytes, plan.predicted_traffic()),
        ("messages", plan.traffic.messages, messages_of(*sizes)),
    ):
        expected = {
            key: [calls * x for x in both] for key, both in expected.items() if key[0] in phases
        }
        if counted != expected:
            bad.append(f"{counted} {what} but predicted {expected}")
    held = held_bytes(x.buffers for needs in phases_of(*sizes, backward) for x in needs)
    counts = plan.problem.queries.counts
    if plan.buffer_bytes > held or (min(counts) > 1 and plan.buffer_bytes < held):
        bad.append(f"{plan.buffer_bytes} bytes of buffers but predicted {held}")
    return bad


def checked(plan):
    """Return the results of this rank, and a description of errors in results, traffic or buffers.

    Of one forward and one backward call; the plan is freed.
    """
    given = problem_for(plan)
    found = results_of(plan, given)
    bad = wrong_in(plan, found, given) + accounts(plan, True)
    plan.free()
    return found, bad


def wrong_plans(make, both):
    """Describe errors of a plan, and, if `both`, in turn; and where the two differ in any bit."""
    (found, bad), *others = (checked(make(overlap=x)) for x in (True, False)[: 1 + both])
    return bad + [x for other, more in others for x in more + differing(found, other)]


def differing(one, other):
    """Describe in which tensors two results differ in any bit."""
    return [f"{x} differs" for x in one if one[x].tobytes() != other[x].tobytes()]
