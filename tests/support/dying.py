"""What runs inside the ranks of jobs in which ranks die; `killing.py` starts them.

`arm` is called before a driver runs.  As a program:

    mpiexec --with-ft ulfm -n 6 python tests/support/dying.py lose FOLDER STAGES [METHOD [HEADS]]
    mpiexec -n 5 python tests/support/dying.py whole METHOD HEADS

`lose` runs plans.  A stage of STAGES, a JSON list, is [phase, victims, seconds]: ranks of the
grid, which kill themselves so many seconds after the stage began; in "program" when they have met
the others, in "shrink" all but the first while the grid shrinks.  Each survivor prints a line
"PHASE lost NUMBERS after SECONDS", and with "hash ROWSxCOLSxHEADS HASH" the hash of the results
on its new grid.  `whole` prints the hashes of grids of 1 to 5 ranks that were made so from the
start."""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

# Before NumPy, as in drivers: it may choose NumPy's matrix products, which changes the last bits.
from a2d_mpi import Causal, ProcessGrid, RanksLost  # isort: skip
import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.executor import Executor
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm import failures
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import squarest
from a2d_mpi.schedules.method import METHODS


def note(folder, event):
    """Keep the time of an event, in nanoseconds, as the name of a file."""
    (folder / f"{event}-{os.getpid()}-{time.monotonic_ns()}").touch()


def times_of(folder, event):
    """Return the times of an event on all ranks in seconds, sorted."""
    return sorted(int(x.name.split("-")[-1]) / 1e9 for x in folder.glob(f"{event}-*"))


def die(folder, event="died"):
    note(folder, event)
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds, *of):
    timer = threading.Timer(seconds, die, of)
    timer.daemon = True
    timer.start()


# Drivers.


def arm(folder, stages):
    """Let ranks of a driver die.

    A stage is [phase, call, victims, seconds].  In this call of the phase the victims die so many
    seconds after the call began.  Calls are counted from the end of the previous stage.  In the
    phase "repair" a smaller grid is made.
    """
    import a2d_mpi.cli.run as cli
    import a2d_mpi.commands.generate_session as generate
    import a2d_mpi.commands.train_job as job
    import a2d_mpi.torch.context as context
    import a2d_mpi.torch.trainers as trainers
    from a2d_mpi.torch.decoding import Steps

    faulthandler.dump_traceback_later(150)  # a rank says where it hangs
    places = {
        "forward": [(AttentionPlan, "forward")],
        "backward": [(AttentionPlan, "backward")],
        "making": [(context, "make_plan")],
        "sums": [(context, "add_gradients")],
        "checkpoint": [(trainers, "_of_first")],  # on all ranks; one writes
        "evaluation": [(job.Trainer, "evaluate")],
        "step": [(Steps, "_exchange")],
        "repair": [(ProcessGrid, "shrink")],
        # The last 50 ms: before the losses are written, and after everything is written.
        "end": [(job, "origin_of")],
        "exit": [(cli, "_leave")],
    }
    folder, rank, calls, earlier = Path(folder), MPI.COMM_WORLD.rank, Counter(), 0

    def dies_in(phase):
        nonlocal earlier
        dead, over = len([*folder.glob("died-*")]), 0
        while over < len(stages) and dead >= len(stages[over][2]):
            dead -= len(stages[over][2])
            over += 1
        if over != earlier:
            earlier = over
            calls.clear()
        calls[phase] += 1
        if over < len(stages):
            wanted, call, victims, seconds = stages[over]
            if phase == wanted and call <= calls[phase] and rank in victims:
                die_after(seconds, folder, f"died-{phase}")

    def watched(do, phase):
        def call(*args, **kwargs):
            if phase == "repair":
                note(folder, "noticed")
            dies_in(phase)
            return do(*args, **kwargs)

        return call

    def noted(do):
        def call(*args, **kwargs):
            result = do(*args, **kwargs)
            note(folder, "goes_on")
            return result

        return call

    for phase, owners in places.items():
        for owner, name in owners:
            setattr(owner, name, watched(getattr(owner, name), phase))
    for x in (job, generate):
        x.ContextParallel = noted(x.ContextParallel)


def hash_of(*arrays):
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


# Plans.

SIZES = {"seqlen": 768, "nheads": 6, "headdim": 16, "kernel": "numpy"}
# Functions in which a rank dies while the grid shrinks.
POINTS = (failures, "_grid_on"), (ProcessGrid, "_split"), (Layout, "on_nodes")
PATIENCE = 100  # seconds: a rank that hears nothing leaves, also on a busy machine


def say(*words):
    """Print a line with one write, so that lines of ranks do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def say_hash(method, grid, *more):
    """Print the hash of all results of a new plan; collective."""
    plan = make_plan(method, grid, Causal(), **SIZES)
    q, k, v, dout = inputs(plan)
    out, lse = plan.forward(q, k, v)
    whole = [plan.gather(x) for x in (out, lse, *plan.backward(dout, q, k, v, out, lse))]
    plan.free()
    if grid.comm.rank == 0:
        say("hash", f"{grid.rows}x{grid.cols}x{grid.heads}", hash_of(*whole), *more)


def inputs(plan):
    whole = np.random.default_rng(0).standard_normal((4, 768, 6, 16), np.float32)
    return [np.ascontiguousarray(x[plan.tokens]) for x in whole]


def acts(phase, method, grid):
    """Return the action that is repeated in a phase, and one that ends it; collective."""
    if phase == "making":
        return lambda: make_plan(method, grid, Causal(), **SIZES).free(), lambda: None
    if phase == "grid":
        new = grid.comm, grid.rows, grid.cols, grid.heads
        return lambda: ProcessGrid(*new).free(), lambda: None
    plan = make_plan(method, grid, Causal(), **SIZES)
    q, k, v, dout = inputs(plan)
    out, lse = plan.forward(q, k, v)
    whole = np.zeros((768, 3)) if grid.comm.rank == 0 else None
    return {
        "backward": lambda: plan.backward(dout, q, k, v, out, lse),
        "rows": lambda: (plan.scatter(whole), plan.gather(out)),
    }.get(phase, lambda: plan.forward(q, k, v)), plan.free


def hear(folder, phase, act):
    """Repeat an action until ranks are lost, and print them and the seconds."""
    until = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            act()
    except RanksLost as error:
        seconds = time.monotonic() - times_of(folder, "died")[0]
        say(phase, "lost", *error.ranks, "after", f"{seconds:.3f}")
        return
    say(phase, "nobody was lost")
    os._exit(1)


def lose(folder, stages, method="attention2d", heads=1, acts=acts, say_hash=say_hash):
    grid = ProcessGrid(MPI.COMM_WORLD, *squarest(MPI.COMM_WORLD.size // heads), heads)
    for i, (phase, victims, seconds) in enumerate(stages):
        here = Path(folder, str(i))
        here.mkdir(exist_ok=True)
        (act, end), rank = acts(phase, method, grid), grid.comm.rank
        act()
        if phase == "program" and rank in victims:
            Executor.run = lambda *x, here=here, **y: die(here)
        elif rank == victims[0] or (rank in victims and phase != "shrink"):
            die_after(seconds, here)
        hear(here, phase, act)
        end()
        if phase == "shrink" and rank in victims[1:]:
            point = POINTS[victims.index(rank) % len(POINTS)]
            setattr(*point, lambda *x, here=here: die(here))
        begin = time.monotonic()
        lost, grid = grid, grid.shrink(method)
        took = time.monotonic() - begin
        lost.free()
        if grid is None:
            say("idle")
            break
        say_hash(method, grid, "shrunk", f"{took:.3f}")
    os._exit(0)  # MPI_Finalize may hang where ranks died a moment ago (Open MPI 5.0.11)


def whole(method, heads, say_hash=say_hash):
    world = MPI.COMM_WORLD
    for size in range(world.size, 0, -1):
        if METHODS[method].most_positions(size) != size or size % heads:
            continue
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        if comm != MPI.COMM_NULL:
            grid = ProcessGrid(comm, *squarest(size // heads), heads)
            say_hash(method, grid)
            grid.free()
            comm.Free()


if __name__ == "__main__":
    kind, first, second, *more = sys.argv[1:]
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    if kind == "lose":
        lose(first, json.loads(second), *more[:1], *map(int, more[1:]))
    else:
        whole(first, int(second))
