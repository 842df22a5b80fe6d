"""Ranks that make different calls are told; ranks that wait report for whom."""

import gc
import os
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from helpers import assert_all, launch
from mpi4py import MPI
from refused import GOOD, assert_raises, message_of
from threadpoolctl import threadpool_info

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid, RingAttention, SlidingWindow
from a2d_mpi.attention.executor import mpi_tag
from a2d_mpi.comm.rows import in_one_row
from a2d_mpi.comm.watch import name_ranks
from a2d_mpi.schedules.steps import KINDS

mpi = pytest.mark.mpi


def inputs(plan):
    rng = np.random.default_rng(plan.grid.comm.rank)
    shape = (len(plan.tokens), plan.nheads, plan.headdim)
    return [rng.standard_normal(shape, np.float32) for _ in range(3)]


@pytest.mark.mpi(min_size=4)
@pytest.mark.multirank
@pytest.mark.parametrize("what", ["mask", "method", "phase", "making"])
def test_other_calls(comm, grid, what):
    """Ranks that make another call than the others are told, and nothing is spoilt."""
    plan = Attention2D(grid, Full(), distribution="zigzag", **GOOD)
    other = (RingAttention if what == "method" else Attention2D)(grid, Causal(), **GOOD)
    x = inputs(plan)
    forward = f"forward of plan {plan._number} (Attention2D), call 1"
    results = other.forward(*x) if what == "phase" else None
    few = [1] if what == "making" else range(1, comm.size, 2)
    call, told = {
        "phase": (lambda: other.backward(x[0], *x, *results),
                  f"backward of plan {other._number} (Attention2D), call 2"),
        "making": (lambda: Attention2D(grid, Full(), **GOOD),
                   f"making of plan {other._number + 1} (Attention2D)"),
    }.get(what, (lambda: other.forward(*x),
                 f"forward of plan {other._number} ({type(other).__name__}), call 1"))  # fmt: skip
    text = message_of(comm, lambda: call() if comm.rank in few else plan.forward(*x))
    rest = name_ranks(sorted({*range(comm.size)} - {*few}))
    right = f"ranks disagree on the call: {forward} on {rest}; {told} on {name_ranks(few)}"
    assert_all(comm, text == right, f"{text}, not {right}")
    for again in (plan, other, Attention2D(grid, Full(), **GOOD)):
        assert_all(comm, np.isfinite(again.forward(*inputs(again))[0]).all(), "a plan is spoilt")


@pytest.mark.mpi(min_size=4)
@pytest.mark.multirank
def test_other_kept_plans(comm, grid):
    """Masks of kept plans are not compared again; the plans' calls are."""
    plan = Attention2D(grid, Causal(), distribution="contiguous", **GOOD)
    other = plan.with_mask(Full())
    x = inputs(plan)
    mine = [plan, other][comm.rank % 2]
    text = "ranks disagree on the call: forward of plan "
    assert_raises(comm, text, lambda: plan.with_mask(mine.mask).forward(*x))
    new = SlidingWindow(3 + comm.rank % 2)
    assert_raises(comm, "ranks disagree on mask: SlidingWindow", lambda: plan.with_mask(new))
    new = Full() if comm.rank % 2 else SlidingWindow(3)  # is kept, has to be made
    text = message_of(comm, lambda: plan.with_mask(new).forward(*x))
    assert "making of plan" in text and "forward of plan" in text
    for again in (plan, other, plan.with_mask(SlidingWindow(3))):
        assert_all(comm, np.isfinite(again.forward(*x)[0]).all(), "the plan is spoilt")


@mpi
def test_two_threads(comm, grid_of):
    """Two threads on one grid get right results, and at least one is refused."""
    own = grid_of(comm.size, 1)
    plans = [kind(own, Causal(), **GOOD) for kind in (Attention2D, RingAttention)]
    x = inputs(plans[0])
    expected = [plan.forward(*x)[0] for plan in plans]
    begun = [threading.Event() for _ in plans]
    for plan in plans:
        kernel = plan._state.kernel
        kernel.forward = partial(_after, begun, kernel.forward)
    found = [None, None]

    def call(i):
        begun[i].set()
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


def _after(events, forward, *args, **options):
    """Compute a while after all events, so that a thread of each waits for the grid."""
    for event in events:
        event.wait()
    time.sleep(0.2)
    forward(*args, **options)


@mpi
def test_plan_is_no_cyclic_garbage(comm, grid):
    plan = Attention2D(grid, Causal(), distribution="contiguous", **GOOD)
    q, k, v = inputs(plan)
    plan.backward(q, q, k, v, *plan.forward(q, k, v))
    plan.with_mask(Full()).forward(q, k, v)
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert_all(comm, gone() is None, "only a garbage collection frees the buffers")
    finally:
        gc.enable()


@mpi
def test_no_communicator_left(comm, monkeypatch):
    class Exhausted(MPI.Intracomm):
        """A communicator that can be split so often."""

        left = 3

        def Split(self, *args):
            Exhausted.left -= 1
            if Exhausted.left < 0:
                raise MPI.Exception(MPI.ERR_OTHER)
            return Exhausted(super().Split(*args))

    text = "MPI has no communicators left: each grid uses five, so free() grids"
    assert_raises(comm, text, ProcessGrid, Exhausted(comm), 1, comm.size)


STALL = """
import os, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.comm import watch
comm, where, folder, reports = MPI.COMM_WORLD, sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
tell, watch._PAUSE = watch.Watch._tell, 2
def noted(self):
    tell(self)
    if where == "grid" or "call 2" in f"{self.doing}":
        (folder / f"{where}-{comm.rank}").touch()
def be_late():  # until the others have reported it
    until = time.monotonic() + 100
    while len([*folder.glob(f"{where}-*")]) < reports and time.monotonic() < until:
        time.sleep(0.1)
watch.Watch._tell = noted
comm.Barrier()
if where == "grid" and comm.rank == 1: be_late()
if where == "call" and comm.rank == 2:
    os.environ["A2D_MPI_STALL_SECONDS"] = "90"  # it has not waited for long when rank 0 says so
grid = ProcessGrid(comm, 1, comm.size)
plan = Attention2D(grid, Causal(), seqlen=40, nheads=2, headdim=8, kernel="numpy")
x = [np.ones((len(plan.tokens), 2, 8), np.float32)] * 3
plan.forward(*x)
if comm.rank == 1:
    if where in ("nobody", "call"): be_late()
    if where == "silent": time.sleep(3)
    if where == "kernel":
        kernel, naps = plan._state.kernel, [0]
        forward = kernel.forward
        kernel.forward = lambda *x, **y: (naps and be_late(), naps.clear(), forward(*x, **y))
plan.forward(*x)
plan.forward(*x)
comm.Barrier()
"""


FORWARD = r"in forward of plan 1 \(Attention2D\), call 2, "
LATE = "rank 1 did not arrive"
# Of each job its number of ranks, A2D_MPI_STALL_SECONDS and _ABORT, and what is told how often.
STALLS = {
    "call": (3, "1", "0", rf"ranks 0 and 2 {FORWARD}to begin; of 3 ranks, {LATE}", 1),
    "kernel": (3, "1", "0", rf"rank.* {FORWARD}for messages \(row\).*; of 3 ranks, {LATE}", 1),
    "grid": (3, "1", "0",
             r"rank [02] in ProcessGrid\(1 x 3 x 1\), for all ranks to call it \(3 ranks\)", 2),
    "nobody": (3, "1", "1", rf".*{LATE}; aborting the job \(A2D_MPI_STALL_ABORT\)", 1),
    "silent": (2, "0", "0", "", 0),
    "unread": (2, "soon", "0", "", 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """Run the jobs of STALLS at the same time; they mostly sleep."""
    folder = tmp_path_factory.mktemp("reports")

    def run(where):
        ranks, seconds, abort, *_, reports = STALLS[where]
        env = {"A2D_MPI_STALL_SECONDS": seconds, "A2D_MPI_STALL_ABORT": abort}
        return launch(ranks, "-c", STALL, where, folder, reports, env=env, code=None)

    with ThreadPoolExecutor() as pool:
        return dict(zip(STALLS, pool.map(run, STALLS)))


@pytest.mark.launches
@pytest.mark.parametrize("where", STALLS)
def test_late_rank(stalled, where):
    """It is named after the time of the environment, or the job ends, or nothing is said.

    On a busy machine ranks may wait for each other elsewhere, too.
    """
    done, (*_, text, number) = stalled[where], STALLS[where]
    lines = [line for line in done.stderr.splitlines() if "a2d_mpi: waiting" in line]
    told = [line for line in lines if re.search(rf"waiting for \d+ s: {text}$", line)]
    assert len(told) == number or (where == "nobody" and told), done.stderr
    if number == 0:
        assert not lines
    if where == "unread":
        text = "A2D_MPI_STALL_SECONDS must be a number of seconds (0: never report), got 'soon'"
        assert text in done.stderr
    elif where == "nobody":
        assert done.returncode not in (0, 1, 2)
    else:
        assert done.returncode == 0, done.stderr


def blas():
    """Return the number of threads that BLAS takes."""
    return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}


@mpi
@pytest.mark.grids
@pytest.mark.parametrize("threads, chosen", [(None, False), (3, False), (None, True)])
def test_blas_threads(comm, grid, monkeypatch, threads, chosen):
    """Inside calls BLAS takes the rank's share of the cores, or what the user chose."""
    for name in [x for x in os.environ if x.endswith("_NUM_THREADS")]:
        monkeypatch.delenv(name)
    if chosen:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")  # as if BLAS had read it at its start
    plan = Attention2D(grid, Causal(), kernel="numpy", threads=threads, **GOOD)
    x, before, inside = inputs(plan), blas(), []
    plan.forward(*x)  # makes the kernel
    forward = plan._state.kernel.forward
    plan._state.kernel.forward = lambda *x, **y: (forward(*x, **y), inside.append(blas()))
    plan.forward(*x)
    share = max(1, len(os.sched_getaffinity(0)) // comm.size)
    assert_all(comm, grid.cores == share, f"{grid.cores} cores, not {share}")
    right = inside[0] == (before if chosen else {threads or share}) and blas() == before
    assert_all(comm, right, f"{inside[0]} inside, {before} before, {blas()} after")


@mpi
def test_no_grid_shrinks_in_a_job_that_ends(grid):
    """A grid does not shrink if MPI ends the job when a rank dies."""
    with pytest.raises(RuntimeError, match="only if MPI continues when a rank dies"):
        grid.shrink()


@pytest.mark.multirank
@pytest.mark.mpi(min_size=2)
def test_reports_of_waits_take_no_messages_of_plans(comm, grid):
    """On a grid in one row, both use one communicator."""
    row, found = in_one_row(grid), True
    for kind in KINDS:
        tag = mpi_tag(kind, 0, 0, 0)
        if comm.rank == 1:
            row.comm.Send(np.zeros(3), 0, tag)
        if comm.rank == 0:
            row.comm.Probe(1, tag)
            with row.watch.waiting("for a test"):
                row.watch.look()
            found = found and row.comm.Iprobe(1, tag)
            row.comm.Recv(np.empty(3), 1, tag)
    assert_all(comm, found, "a report took a message")


@pytest.mark.mpi(min_size=4)
@pytest.mark.multirank
def test_plans_of_a_grid_and_of_its_row(comm, grid):
    """They have numbers of their own, so ranks that call different ones are told."""
    plans = [Attention2D(x, Full(), **GOOD) for x in (grid, in_one_row(grid))]
    assert plans[0]._number != plans[1]._number
    plan = plans[comm.rank % 2]
    text = message_of(comm, lambda: plan.forward(*inputs(plan)))
    assert text.startswith("ranks disagree on the call: forward of plan")
