"""Whoever is killed and when: files stay whole, jobs resume, and with ULFM the others go on."""

import pytest
from helpers import drive, launch, read_runs
from killing import ULFM, hashes, lose, what_was_lost

launches = pytest.mark.launches


def goes_on(test):
    """Mark a test of a job that continues when ranks die."""
    return launches(pytest.mark.ulfm(test))


# Jobs that end, and are started again.

NUMPY = ["--kernel", "numpy"]  # as `drive` has it: what is killed goes on with the same bits
BENCH = ["--nheads", 2, "--headdim", 8, "--trials", 2, *NUMPY]
KILL = """
import h5py, a2d_mpi.results.hdf5 as hdf5
old, calls, after = {0}, [], {2!r} == "after"
def counted(*given, **options):
    found = old(*given, **options) if after else None
    calls.append(0)
    if len(calls) == {1}: os.kill(os.getpid(), 9)
    return found if after else old(*given, **options)
{0} = counted
"""


def killed_when(name, call, when="before"):
    """Return a sabotage: the rank is killed before or after a call of a function."""
    return KILL.format(name, call, when)


# How a job ends of which a rank was killed is for MPI to say, the file is for the kernel.
@pytest.mark.parametrize(
    "function, call, when, left",
    [
        # There are two workloads of two plans each; the second one makes the groups 31 to 59.
        pytest.param("h5py.Group.require_group", 45, "before", 2, marks=pytest.mark.thorough),
        pytest.param("os.replace", 2, "before", 2, marks=pytest.mark.thorough),
        pytest.param("os.replace", 2, "after", 4, marks=launches),
    ],
)
def test_a_sweep_killed_while_writing(tmp_path, function, call, when, left):
    path = tmp_path / "bench.h5"
    options = ["--output", path, *BENCH, "--seqlens", "64,65", "--plans", "ring,attention2d:1x2"]
    sabotage = killed_when(function, call, when)
    done = drive("bench.py", 2, *options, sabotage=sabotage, code=None)
    assert done.returncode not in (0, 1, 2)
    assert len(read_runs(path)) == left
    drive("bench.py", 2, *options, "--resume")
    assert len(read_runs(path)) == 4


# Plans of the survivors.


# Phase, who dies, and after how many seconds; the first rank, the last one, or several.
@goes_on
@pytest.mark.parametrize("method, heads, stages, shapes", [
    ("attention2d", 1, [("forward", [0], 0.05), ("backward", [3], 0.1), ("making", [1, 2], 0.07)],
     ["1x5x1", "2x2x1", "1x2x1"]),
    # Two grids of 1 x 3, then 1 x 5, as 5 is odd.
    ("attention2d", 2, [("backward", [2], 0.04), ("rows", [0, 4], 0.03), ("making", [1], 0.02)],
     ["1x5x1", "1x3x1", "1x2x1"]),
    ("double ring", 1, [("rows", [5], 0.02), ("backward", [0, 4], 0.05)], ["1x5x1", "1x3x1"]),
    ("attention2d", 1, [("grid", [5], 0.05), ("making", [0], 0.05)], ["1x5x1", "2x2x1"]),
    # One after the other, the second while the first grid is made anew.
    ("ring", 1, [("shrink", [4, 0], 0.1), ("forward", [0, 1, 2], 0.05)], ["2x2x1", "1x1x1"]),
    # Only its neighbours wait for the dead rank: the wait of the others must be ended.
    ("ring", 1, [("program", [0], 0)], ["1x5x1"]),
    ("triangle", 1, [("forward", [5], 0.05)], ["1x3x1"]),
])  # fmt: skip
def test_survivors_go_on(tmp_path, method, heads, stages, shapes):
    """All survivors hear of a loss, and compute what their new grid computes."""
    done = lose(tmp_path, stages, method, heads)
    problem, told = what_was_lost(done, method, stages)
    assert not problem, done.stdout + done.stderr
    left = [6 - sum(len(x) for _, x, _ in stages[: i + 1]) for i in range(len(stages))]
    assert len(told) >= sum(left) and [shape for shape, _ in hashes(done)] == shapes


# Rank 0 waits on the caller's communicator for a rank that lives, and agrees already.
AGREEING = """
from a2d_mpi.comm.failures import Failures
comm.Set_errhandler(MPI.ERRORS_RETURN)
try:
    with Failures(comm, []).all_or_none():
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.Recv(np.empty(1), source=comm.rank + 1)
except RanksLost as error:
    os.write(1, f"{error.ranks}\\n".encode())
os._exit(0)
"""
# Making the first or second communicator of a grid fails: this must not block later creations.
SECOND_GRID = """
import time
if made:  # the context ids of the grids' communicators are lower than that of `comm`
    old = [comm.Dup() for _ in range(16)]
    comm = comm.Dup()
    for other in old:
        other.Free()
first, keep = ProcessGrid(comm, 1, 3), ProcessGrid._keep
def die(self, *args):  # when the others choose a context id: MPI has gathered colors
    if len(self.failures.comms) < made:
        return keep(self, *args)
    comm.Allgather(np.zeros(2, "i"), np.zeros(6, "i"))
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 1:
    ProcessGrid._keep = die
try:
    ProcessGrid(comm, 3, 1)
except RanksLost:
    os.write(1, f"{first.shrink()}\\n".encode())
os._exit(0)
"""
# Rank 1 dies while others wait for its state; the others go on with a grid of their own.
LINEAR = """
from a2d_mpi import Causal, LinearAttention
def plan_on(grid):
    plan = LinearAttention(grid, Causal(), seqlen=99, nheads=2, headdim=8, states=states)
    return plan, [np.ones((len(plan.tokens), 2, 8), "f4")] * 3
grid = ProcessGrid(comm, 1, 4)
plan, qkv = plan_on(grid)
wanted = grid.comm.allreduce(plan.forward(*qkv)[0].sum(dtype=float))
if comm.rank == 1:
    plan._exchange.finish = lambda: os.kill(os.getpid(), signal.SIGKILL)
try:
    plan.forward(*qkv)
    plan.forward(*qkv)  # a rank that needed nothing of the one that died hears of it here
except RanksLost:
    grid = grid.shrink()
plan, qkv = plan_on(grid)
found = grid.comm.allreduce(plan.forward(*qkv)[0].sum(dtype=float))
os.write(1, f"{abs(found / wanted - 1) < 1e-6} on {grid.comm.size}\\n".encode())
try:  # the exit of a rank must not look like a loss to one that still waits for its message
    grid.comm.Barrier()
except MPI.Exception:
    pass
os._exit(0)  # MPI_Finalize may hang where ranks died a moment ago (Open MPI 5.0.11)
"""
PROGRAM = """
import os, signal
import numpy as np
from a2d_mpi import ProcessGrid, RanksLost
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""


@goes_on
@pytest.mark.parametrize("ranks, code, lines", [
    pytest.param(3, AGREEING, ["(2,)"] * 2, id="agreeing"),
    *(pytest.param(3, f"made = {x}{SECOND_GRID}", ["ProcessGrid(1 x 2)"] * 2, id=f"grid {x}")
      for x in (0, 1)),
    *(pytest.param(4, f"states = {x!r}{LINEAR}", ["True on 3"] * 3, id=x)
      for x in ("gather", "ring")),
])  # fmt: skip
def test_small_programs_go_on(ranks, code, lines):
    done = launch(ranks, "-c", PROGRAM + code, options=ULFM, code=None)
    assert done.stdout.splitlines()[: len(lines)] == lines, done.stdout + done.stderr


# A driver has done everything.  Ranks die before the last agreement, between this agreement and
# their exit, or while the others leave.
END = """
import atexit, os, signal, sys, time
import a2d_mpi.cli.run as cli
from a2d_mpi.cli.options import Parser
from mpi4py import MPI
moment, victims, rank = {!r}, {!r}, MPI.COMM_WORLD.rank
def die(*args):
    time.sleep(0.3 * (moment == "leaving"))
    os.kill(os.getpid(), signal.SIGKILL)
old = cli._wait_idly
def waited(*args):
    at_the_end = len(args) == 2
    if at_the_end and moment == "agreeing":
        die()
    result = old(*args)
    if at_the_end and moment == "agreed":
        die()
    return result
if rank in victims and moment == "leaving":
    sys.exit = os._exit = die
elif rank in victims:
    cli._wait_idly = waited
else:
    atexit.register(time.sleep, 100)  # an MPI_Finalize that waits for the dead
def body(comm, args):
    os.write(1, b"done\\n")
    return 0
Parser.body = staticmethod(body)
cli.run(MPI.COMM_WORLD, lambda comm: Parser("end.py", "An end.", comm))
"""


@goes_on
@pytest.mark.parametrize(
    "moment, victims",
    [("agreeing", [2]), ("agreed", [0]), ("agreed", [1, 2]), ("leaving", [0]), ("leaving", [2])],
)
def test_who_dies_at_the_end_changes_nothing(moment, victims):
    """A finished job ends with exit code 0."""
    done = launch(3, "-c", END.format(moment, victims), options=ULFM)
    assert done.stdout.count("done") == 3
    assert "Traceback" not in done.stderr
