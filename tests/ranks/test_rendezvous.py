"""Ranks that make different calls are told; ranks that wait report for whom."""

import gc
import os
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import assert_all, launch
from mpi4py import MPI
from refused import GOOD, assert_raises, message_of

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid, RingAttention
from a2d_mpi.comm.watch import name_ranks

mpi = pytest.mark.mpi
several = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]


@pytest.fixture(scope="module")
def grid(comm):
    grid = ProcessGrid(comm, 1, comm.size)
    yield grid
    grid.free()


def inputs(plan, number=3):
    rng = np.random.default_rng(plan.grid.comm.rank)
    shape = (len(plan.tokens), plan.nheads, plan.headdim)
    return [rng.standard_normal(shape, np.float32) for _ in range(number)]


class TestOtherCalls:
    pytestmark = several

    @pytest.mark.parametrize("kind", [Attention2D, RingAttention])
    def test_other_plans(self, comm, grid, kind):
        """A plan with another mask or method is refused, although the shapes agree."""
        plans = [
            Attention2D(grid, Full(), distribution="zigzag", **GOOD),
            kind(grid, Causal(), **GOOD),
        ]
        x = inputs(plans[0])
        mine = comm.rank % 2
        text = message_of(comm, lambda: plans[mine].forward(*x))
        a, b = (
            f"forward of plan {plan._number} ({type(plan).__name__}), call 1" for plan in plans
        )
        even, odd = (name_ranks(range(i, comm.size, 2)) for i in range(2))
        assert text == f"ranks disagree on the call: {a} on {even}; {b} on {odd}"
        # Nothing is spoilt.
        for plan in plans:
            out, _ = plan.forward(*x)
            assert_all(comm, np.isfinite(out).all(), "the plan is spoilt")

    def test_other_phases(self, comm, grid):
        plan = Attention2D(grid, Causal(), **GOOD)
        q, k, v = inputs(plan)
        out, lse = plan.forward(q, k, v)

        def call():
            if comm.rank == 0:
                plan.forward(q, k, v)
            else:
                plan.backward(out, q, k, v, out, lse)

        text = message_of(comm, call)
        assert re.search(r"forward .*, call 2 on rank 0; backward .*, call 2 on ranks 1, ", text)
        plan.backward(out, q, k, v, out, lse)

    def test_one_makes_a_plan(self, comm, grid):
        plan = Attention2D(grid, Causal(), **GOOD)
        x = inputs(plan)

        def call():
            if comm.rank == 1:
                Attention2D(grid, Full(), **GOOD)
            else:
                plan.forward(*x)

        text = f"making of plan {plan._number + 1} (Attention2D) on rank 1"
        assert_raises(comm, text, call)
        plan.forward(*x)
        other = Attention2D(grid, Full(), **GOOD)
        other.forward(*inputs(other))


@mpi
def test_two_threads(comm, grid_of):
    """Two threads on one grid get right results, and at least one is refused."""
    own = grid_of(comm.size, 1)
    plans = [kind(own, Causal(), **GOOD) for kind in (Attention2D, RingAttention)]
    x = inputs(plans[0])
    expected = [plan.forward(*x)[0] for plan in plans]
    for plan in plans:
        kernel = plan._engine.kernel
        kernel.forward = _slow(kernel.forward)
    found = [None, None]

    def call(i):
        try:
            found[i] = np.array_equal(plans[i].forward(*x)[0], expected[i])
        except ValueError as error:
            found[i] = str(error)

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [x for x in found if x is not True]
    texts = ("two threads called plans of one grid", "ranks disagree on the call")
    ok = refused and all(isinstance(x, str) and x.startswith(texts) for x in refused)
    assert_all(comm, ok, f"{found}")
    comm.Barrier()
    for plan, out in zip(plans, expected):
        assert_all(comm, np.array_equal(plan.forward(*x)[0], out), "the plan is spoilt")


def _slow(forward):
    def later(*args, **options):
        time.sleep(0.2)
        forward(*args, **options)

    return later


@mpi
def test_plan_is_no_cyclic_garbage(comm, grid):
    plan = Attention2D(grid, Causal(), **GOOD)
    q, k, v = inputs(plan)
    plan.backward(q, q, k, v, *plan.forward(q, k, v))
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert_all(comm, gone() is None, "only a garbage collection frees the buffers")
    finally:
        gc.enable()


@mpi
def test_no_communicator_left(comm, monkeypatch):
    class Exhausted:
        """A communicator that can be split so often."""

        left = 3

        def __init__(self, comm):
            self.comm = comm

        def __getattr__(self, name):
            return getattr(self.comm, name)

        def Split(self, *args):
            Exhausted.left -= 1
            if Exhausted.left < 0:
                raise MPI.Exception(MPI.ERR_OTHER)
            return Exhausted(self.comm.Split(*args))

    text = "MPI has no communicators left: each grid uses five, so free() grids"
    assert_raises(comm, text, ProcessGrid, Exhausted(comm), 1, comm.size)


STALL = """
import os, sys, time
import numpy as np
from mpi4py import MPI
from a2d_mpi import Attention2D, Causal, ProcessGrid
comm = MPI.COMM_WORLD
where = sys.argv[1]
if where == "grid" and comm.rank == 1: time.sleep(4)
grid = ProcessGrid(comm, 1, comm.size)
plan = Attention2D(grid, Causal(), seqlen=40, nheads=2, headdim=8, kernel="numpy")
x = [np.ones((len(plan.tokens), 2, 8), np.float32)] * 3
plan.forward(*x)
if comm.rank == 2: time.sleep(1.3)  # it has not waited for long when the others say so
if comm.rank == 1:
    time.sleep({"nobody": 60, "call": 4, "silent": 4}.get(where, 0))
    if where == "kernel":
        kernel, naps = plan._engine.kernel, [4]
        forward = kernel.forward
        kernel.forward = lambda *x, **y: (time.sleep(naps.pop() if naps else 0), forward(*x, **y))
plan.forward(*x)
plan.forward(*x)
comm.Barrier()
"""


# Which job, how many ranks it has, and A2D_MPI_STALL_SECONDS and _ABORT.
STALLS = {
    "call": (3, "1", "0"),
    "kernel": (3, "1", "0"),
    "grid": (3, "1", "0"),
    "nobody": (3, "1", "1"),
    "silent": (2, "0", "0"),
    "unread": (2, "soon", "0"),
}


@pytest.fixture(scope="module")
def stalled():
    """Run the jobs of STALLS at the same time; they mostly sleep."""

    def run(where):
        ranks, seconds, abort = STALLS[where]
        env = {"A2D_MPI_STALL_SECONDS": seconds, "A2D_MPI_STALL_ABORT": abort}
        return launch(ranks, "-c", STALL, where, timeout=60, env=env, code=None)

    with ThreadPoolExecutor() as pool:
        return dict(zip(STALLS, pool.map(run, STALLS)))


@pytest.mark.launches
@pytest.mark.parametrize(
    "where, text",
    [
        ("call", r"ranks 0 and 2 in forward of plan 1 \(Attention2D\), call 2, to begin; of 3 "
                 r"ranks, rank 1 did not arrive"),
        ("kernel", r"rank.* in forward of plan 1 \(Attention2D\), call 2, for messages \(row\).*"
                   r"; of 3 ranks, rank 1 did not arrive"),
        ("grid", r"rank 0 in ProcessGrid\(1 x 3 x 1\), for all ranks to call it \(3 ranks\)"),
    ],
)  # fmt: skip
def test_late_rank(stalled, where, text):
    done = stalled[where]
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "a2d_mpi: waiting" in line]
    assert any(re.search(rf"waiting for [2-5] s: {text}$", line) for line in lines), done.stderr
    assert len(lines) == (2 if where == "grid" else 1)


@pytest.mark.launches
def test_rank_that_never_comes(stalled):
    done = stalled["nobody"]
    assert done.returncode not in (0, 1, 2)
    assert "rank 1 did not arrive; aborting the job" in done.stderr
    assert done.seconds < 30


@pytest.mark.launches
def test_stall_settings(stalled):
    done = stalled["silent"]
    assert done.returncode == 0 and "waiting" not in done.stderr, done.stderr
    text = "A2D_MPI_STALL_SECONDS must be a number of seconds (0: never report), got 'soon'"
    assert text in stalled["unread"].stderr


THREADS = """
import os, sys
import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits
from a2d_mpi import Attention2D, Causal, ProcessGrid

def blas(): return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}

comm = MPI.COMM_WORLD
grid = ProcessGrid(comm, 1, comm.size)
arguments = {} if sys.argv[1] == "none" else {"threads": int(sys.argv[1])}
plan = Attention2D(grid, Causal(), seqlen=40, nheads=2, headdim=8, kernel="numpy", **arguments)
x = [np.ones((len(plan.tokens), 2, 8), np.float32)] * 3
before, inside = blas(), set()
plan.forward(*x)
forward = plan._engine.kernel.forward
plan._engine.kernel.forward = lambda *x, **y: (forward(*x, **y), inside.update(blas()))
plan.forward(*x)
if comm.rank == 0:
    print(grid.cores, "before", *before, "inside", *inside, "after", *blas())
"""


@pytest.mark.parametrize(
    "ranks, argument, environment, inside",
    # How many ranks a node has is for MPI to say.
    [
        pytest.param(4, None, None, "share", marks=pytest.mark.launches),
        (1, None, None, "share"),
        (2, 3, None, 3),
        (2, None, 2, 2),
    ],
)
def test_blas_threads(monkeypatch, ranks, argument, environment, inside):
    for name in [x for x in os.environ if x.endswith("_NUM_THREADS")]:
        monkeypatch.delenv(name)
    if environment:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(environment))
    done = launch(ranks, "-c", THREADS, "none" if argument is None else argument, timeout=60)
    share, before, found, after = map(
        int, re.search(r"(\d+) before (\d+) inside (\d+) after (\d+)\n", done.stdout).groups()
    )
    assert share == max(1, len(os.sched_getaffinity(0)) // ranks)
    assert after == before
    assert found == (share if inside == "share" else inside)


@mpi
def test_no_grid_shrinks_in_a_job_that_ends(grid):
    """A grid does not shrink if MPI ends the job when a rank dies."""
    with pytest.raises(RuntimeError, match="only if MPI continues when a rank dies"):
        grid.shrink()
