"""Ranks die, and the others go on: with Open MPI's ULFM."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from helpers import launch

pytestmark = [pytest.mark.launches, pytest.mark.ulfm]

LOST = Path(__file__).with_name("lost.py")
ULFM = ("--with-ft", "ulfm")


def left_behind(folder):
    """Return PIDs of processes that have the folder among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [int(entry.name)] * (os.fsencode(folder) in words)
    return found


def lose(folder, stages, *more, timeout=60, env=None):
    command = LOST, folder, json.dumps(stages), *more
    done = launch(6, *command, timeout=timeout, options=ULFM, env=env, code=None)
    until = time.monotonic() + 5  # what mpiexec has killed may take a moment
    while left_behind(folder):
        assert time.monotonic() < until
        time.sleep(0.1)
    return done


def hashes(text):
    return dict(re.findall(r"^hash (\S+) (\w+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def from_the_start(tmp_path_factory):
    """Return hashes of results on new grids, by method and Ulysses group size."""
    known = {}

    def find(method, heads=1):
        if (method, heads) not in known:
            folder = tmp_path_factory.mktemp("start")
            done = launch(5, LOST, folder, method, heads, timeout=60)
            known[method, heads] = hashes(done.stdout)
        return known[method, heads]

    return find


@pytest.mark.parametrize(
    "method, heads, stages, shapes",
    [
        (
            "attention2d",
            1,
            [("forward", [0], 0.05), ("backward", [3], 0.1), ("making", [1, 2], 0.07)],
            ["1x5x1", "2x2x1", "1x2x1"],
        ),
        (
            "attention2d",
            2,  # two grids of 1 x 3, then 1 x 5, as 5 is odd
            [("backward", [2], 0.04), ("rows", [0, 4], 0.03), ("making", [1], 0.02)],
            ["1x5x1", "1x3x1", "1x2x1"],
        ),
        (  # one after the other, the second while the first grid is made anew
            "ring",
            1,
            [("shrink", [4, 0], 0.1), ("forward", [0, 1, 2], 0.05)],
            ["2x2x1", "1x1x1"],
        ),
        ("triangle", 1, [("forward", [5], 0.05)], ["1x3x1"]),
    ],
)
def test_survivors_go_on(tmp_path, from_the_start, method, heads, stages, shapes):
    """All survivors hear of a loss soon, and compute what their new grid computes."""
    done = lose(tmp_path, stages, method, heads)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^(\w+) lost .+ after (\S+)$", done.stdout, re.MULTILINE)
    ranks = 6
    for phase, victims, _ in stages:
        seconds = [float(after) for heard_in, after in told if heard_in == phase]
        ranks -= len(victims)
        assert len(seconds) >= ranks and max(seconds) < 10
    found = re.findall(r"^hash (\S+) (\w+)", done.stdout, re.MULTILINE)
    assert [shape for shape, _ in found] == shapes
    expected = from_the_start(method) | from_the_start(method, 1)
    assert all(expected[shape] == text for shape, text in found)


def test_nobody_else_is_told_without_revocation(tmp_path):
    """On a ring only its neighbours wait for a dead rank: the others' wait must be ended."""
    stages = [("program", [0], 0)]
    assert hashes(lose(tmp_path, stages, "ring").stdout)
    (tmp_path / "untold").mkdir()
    env = {"A2D_TEST_UNTOLD": "3"}
    done = lose(tmp_path / "untold", stages, "ring", env=env)
    assert done.returncode and not hashes(done.stdout)
    assert len(re.findall("^program lost 0 after", done.stdout, re.MULTILINE)) in (1, 2)


AGREEING = """
import os, signal, numpy as np
from mpi4py import MPI
from a2d_mpi.comm.failures import Failures, RanksLost
comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
try:
    with Failures(comm, []).all_or_none():
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.Recv(np.empty(1), source=comm.rank + 1)  # rank 1 lives, and sends nothing
except RanksLost as error:
    os.write(1, f"rank {comm.rank} lost {error.ranks}\\n".encode())
os._exit(0)
"""


def test_who_waits_for_a_survivor_is_told():
    """Rank 0 waits on the caller's communicator for a rank that agrees already."""
    done = launch(3, "-c", AGREEING, timeout=20, options=ULFM, code=None)
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 lost (2,)", "rank 1 lost (2,)"]


SECOND_GRID = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from a2d_mpi import ProcessGrid, RanksLost
comm, made = MPI.COMM_WORLD, int(sys.argv[1])
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
    os.write(1, f"rank {comm.rank}: {first.shrink()}\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize("made", [0, 1])
def test_an_older_grid_shrinks_after_a_new_one_failed(made):
    """Making its first or second communicator fails: this must not block later creations."""
    done = launch(3, "-c", SECOND_GRID, made, timeout=20, options=ULFM, code=None)
    grid = "ProcessGrid(1 x 2)"
    assert sorted(done.stdout.split("\n")[:2]) == [f"rank 0: {grid}", f"rank 2: {grid}"]
