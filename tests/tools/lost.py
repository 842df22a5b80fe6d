"""Run a job in which ranks die, one stage after the other, and the survivors continue.

    mpiexec --with-ft ulfm -n 6 python tests/tools/lost.py FOLDER STAGES
    mpiexec -n 5 python tests/tools/lost.py FOLDER METHOD HEADS

A stage of STAGES, a JSON list, is [phase, victims, seconds]: ranks of the grid, which kill
themselves by SIGKILL so many seconds after the stage began; in "program" when they have met the
others, in "shrink" all but the first while the grid shrinks.  Each survivor prints a line
"PHASE lost NUMBERS after SECONDS", and with "hash ROWSxCOLSxHEADS HASH" the hash of the results on
its new grid.  The second command prints the hashes of grids of 1 to 5 ranks that were made so from
the start.  tests/system/test_ulfm.py and tests/tools/losses.py start it.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from a2d_mpi import Causal, ProcessGrid, RanksLost  # isort: skip
from mpi4py import MPI

from a2d_mpi.attention.executor import Executor
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.comm import failures
from a2d_mpi.core.sizes import Layout, squarest
from a2d_mpi.schedules import METHODS

SIZES = {"seqlen": 768, "nheads": 6, "headdim": 16, "kernel": "numpy"}
# Functions in which a rank dies while the grid shrinks.
POINTS = (failures, "_grid_on"), (ProcessGrid, "_split"), (Layout, "on_nodes")
PATIENCE = 20  # seconds: a rank that hears nothing leaves


def say(*words):
    """Print a line with one write, so that lines of ranks do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def inputs(plan):
    whole = np.random.default_rng(0).standard_normal((4, 768, 6, 16), np.float32)
    return [np.ascontiguousarray(x[plan.tokens]) for x in whole]


def results(method, grid):
    """Return the hash of all results of a new plan; collective."""
    plan = make_plan(method, grid, Causal(), **SIZES)
    q, k, v, dout = inputs(plan)
    out, lse = plan.forward(q, k, v)
    found = out, lse, *plan.backward(dout, q, k, v, out, lse)
    whole = [plan.gather(x) for x in found]
    plan.free()
    if grid.comm.rank:
        return None
    return hashlib.sha256(b"".join(x.tobytes() for x in whole)).hexdigest()


def told(folder, phase, act):
    """Repeat an action until ranks are lost; return the ranks and the seconds."""
    until = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            act()
    except RanksLost as error:
        seconds = time.monotonic() - min(float(x.read_text()) for x in folder.iterdir())
        say(phase, "lost", *error.ranks, "after", f"{seconds:.3f}")
        return
    say(phase, "nobody was lost")
    os._exit(1)


def die(folder):
    (folder / str(os.getpid())).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def acts(phase, method, grid):
    """Return the action that is repeated in a phase; collective."""
    if phase == "making":
        return lambda: make_plan(method, grid, Causal(), **SIZES).free()
    if phase == "grid":
        shape = grid.rows, grid.cols, grid.heads
        return lambda: ProcessGrid(grid.comm, *shape).free()
    plan = make_plan(method, grid, Causal(), **SIZES)
    q, k, v, dout = inputs(plan)
    out, lse = plan.forward(q, k, v)
    whole = np.zeros((768, 3)) if grid.comm.rank == 0 else None
    return {
        "forward": lambda: plan.forward(q, k, v),
        "backward": lambda: plan.backward(dout, q, k, v, out, lse),
        "program": lambda: plan.forward(q, k, v),
        "shrink": lambda: plan.forward(q, k, v),
        "rows": lambda: (plan.scatter(whole), plan.gather(out)),
    }[phase]


def lose(folder, stages, method="attention2d", heads=1):
    grid = ProcessGrid(MPI.COMM_WORLD, *squarest(MPI.COMM_WORLD.size // heads), heads)
    for i, (phase, victims, seconds) in enumerate(stages):
        here = folder / str(i)
        here.mkdir(exist_ok=True)
        act = acts(phase, method, grid)
        act()
        if phase == "program" and grid.comm.rank in victims:
            Executor.run = lambda *x, here=here, **y: die(here)
        elif grid.comm.rank == victims[0] or (grid.comm.rank in victims and phase != "shrink"):
            timer = threading.Timer(seconds, die, [here])
            timer.daemon = True
            timer.start()
        rank = grid.comm.rank
        told(here, phase, act)
        if phase == "shrink" and rank in victims[1:]:
            point = POINTS[victims.index(rank) % len(POINTS)]
            setattr(*point, lambda *x, here=here: die(here))
        begin = time.monotonic()
        lost, grid = grid, grid.shrink(method)
        took = time.monotonic() - begin
        lost.free()
        if grid is None:
            say("idle")
            return
        found = results(method, grid)
        if found:
            shape = f"{grid.rows}x{grid.cols}x{grid.heads}"
            left = ",".join(map(str, sorted(grid.failures.numbers)))
            say("hash", shape, found, "left", left, "shrunk", f"{took:.3f}")
    grid.free()


def whole_from_the_start(method, heads):
    world = MPI.COMM_WORLD
    for size in range(world.size, 0, -1):
        if METHODS[method].most_positions(size) != size or size % heads:
            continue
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        if comm != MPI.COMM_NULL:
            grid = ProcessGrid(comm, *squarest(size // heads), heads)
            if found := results(method, grid):
                say("hash", f"{grid.rows}x{grid.cols}x{grid.heads}", found)
            grid.free()
            comm.Free()


if __name__ == "__main__":
    seconds = os.environ.get("A2D_TEST_UNTOLD")
    if seconds:  # ranks that are not told wait for good
        failures.Failures.revoke = lambda self: None
    faulthandler.dump_traceback_later(float(seconds or PATIENCE + 10), exit=True)
    if sys.argv[2].startswith("["):
        lose(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:]))
        os._exit(0)  # MPI_Finalize may hang where ranks died a moment ago (Open MPI 5.0.11)
    else:
        whole_from_the_start(sys.argv[2], int(sys.argv[3]))
