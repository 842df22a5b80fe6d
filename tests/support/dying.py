"""Let ranks of a driver kill themselves, and repeat the training without a loss.

`arm` is called before a driver runs (tests/tools/survivals.py).  A stage is [phase, call, victims,
seconds].  In this call of the phase the victims send themselves SIGKILL, `seconds` after the call
began.  Calls are counted from the end of the previous stage.  In the phase "repair" a smaller grid
is made.

    mpiexec -n 6 python tests/support/dying.py OPTIONS RANGES

trains by OPTIONS, a JSON list, on a new grid for each of RANGES, [[end, ranks, rows, cols], ...],
and prints the hash of losses and weights: what a run comes to that lost ranks at these steps.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from helpers import parser_of
from mpi4py import MPI

import a2d_mpi.experiments.cli as cli
import a2d_mpi.experiments.train_gpt as job
import a2d_mpi.gpt.decode as decode
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.experiments.generate import _Answers

PATIENCE = 40  # seconds, after which a rank says where it hangs
PHASES = {
    "forward": [(AttentionPlan, "forward")],
    "backward": [(AttentionPlan, "backward")],
    "making": [(job, "make_plan"), (decode, "make_plan")],
    "checkpoint": [(job.Trainer, "_keep_if_due")],  # on all ranks; one writes
    "evaluation": [(job.Trainer, "evaluate")],
    "step": [(decode.Decoder, "step")],
    "repair": [(ProcessGrid, "shrink")],
    # The last 50 ms: before the losses are written, and after everything is written.
    "end": [(job, "origin_of")],
    "exit": [(cli, "lost_output")],
}


def note(folder, event):
    """Keep the time of an event, in nanoseconds, as the name of a file."""
    (folder / f"{event}-{os.getpid()}-{time.monotonic_ns()}").touch()


def arm(folder, stages):
    """Let ranks die at the given stages."""
    faulthandler.dump_traceback_later(PATIENCE)
    folder, rank = Path(folder), MPI.COMM_WORLD.rank
    calls, earlier = dict.fromkeys(PHASES, 0), 0

    def die(phase):
        note(folder, f"died-{phase}")
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_in(phase):
        nonlocal earlier
        dead, over = len([*folder.glob("died-*")]), 0
        while over < len(stages) and dead >= len(stages[over][2]):
            dead -= len(stages[over][2])
            over += 1
        if over != earlier:
            earlier = over
            calls.update(dict.fromkeys(PHASES, 0))
        calls[phase] += 1
        if over < len(stages):
            wanted, call, victims, seconds = stages[over]
            if phase == wanted and call <= calls[phase] and rank in victims:
                timer = threading.Timer(seconds, die, [phase])
                timer.daemon = True
                timer.start()

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

    for phase, places in PHASES.items():
        for owner, name in places:
            setattr(owner, name, watched(getattr(owner, name), phase))
    job.Trainer.go_on = noted(job.Trainer.go_on)
    _Answers.check_room = noted(_Answers.check_room)


def result_hash(losses, weights):
    return hashlib.sha256(losses.tobytes() + weights.tobytes()).hexdigest()


def without_loss(options, ranges):
    """Return the hash of a training on one grid after the other; collective."""
    args = parser_of("drivers/train.py").parse_args(["gpt", *options])
    world, state = MPI.COMM_WORLD, None
    text, _, config = job._validated(args)
    for end, ranks, rows, cols in ranges:
        comm = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if comm == MPI.COMM_NULL:
            continue
        grid = ProcessGrid(comm, rows, cols)
        state = state or job._resumed(comm, args, config, text)
        trainer = job.Trainer(comm, grid, args, text, state)
        while state.step < end:
            trainer.step()
        moments = trainer._training.adam.moments
        state = replace(state, weights=trainer.weights(), moments=moments)
        trainer.free()
        grid.free()
        comm.Free()
    return result_hash(state.losses, state.weights) if world.rank == 0 else None


if __name__ == "__main__":
    found = without_loss(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
    if found:
        print(found)
