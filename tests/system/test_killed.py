"""Whoever is killed and when: files stay whole, jobs resume, and with ULFM the others go on."""

import os
import re

import h5py
import pytest
from a2d_mpi.experiments.checkpoint import latest
from helpers import ROOT, drive, launch, named, read_runs
from killing import (
    ASKING,
    PROMPTS,
    TRAINING,
    ULFM,
    answers_of,
    files,
    hashes,
    lose,
    problem_of,
    survive,
    trained_badly,
    what_was_lost,
)

launches = pytest.mark.launches


def goes_on(test):
    """Mark a test of a job that continues when ranks die."""
    return launches(pytest.mark.ulfm(test))


# Jobs that end, and are started again.

NUMPY = ["--kernel", "numpy"]  # as `drive` has it: what is killed goes on with the same bits
BENCH = ["--nheads", 2, "--headdim", 8, "--trials", 2, *NUMPY]
TEXT = [ROOT / "LICENSE", "--separator", "", "--layers", 1, "--width", 8, "--nheads", 2,
        "--seqlen", 40, "--warmup-steps", 5, *NUMPY]  # fmt: skip
KILL = """
import h5py, a2d_mpi.experiments.hdf5 as hdf5
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
    assert len(read_runs(path)) == 4 and os.listdir(tmp_path) == ["bench.h5"]


def step_of(folder):
    """Return the step of the latest checkpoint."""
    return max((int(x.stem[5:]) for x in folder.glob("checkpoints/step-*.h5")), default=0)


def ended(folder):
    """Return the state of a finished training; assert that nothing else is left."""
    assert sorted(os.listdir(folder)) == ["checkpoints", "out.h5"]
    state, refused = latest(folder / "checkpoints")
    assert not refused and len(os.listdir(folder / "checkpoints")) == 2
    with h5py.File(folder / "out.h5") as file:
        assert file["loss"][()].tolist() == state.losses.tolist()
    return state.step, state.weights.tobytes(), state.moments.tobytes(), state.losses.tobytes()


def test_a_training_killed_while_writing(tmp_path):
    """Checkpoints after steps 2, 4, 6, 8 and 9, then losses; it goes on with others."""
    expected = None
    for name, sabotage, step in (
        ("whole", "", 9),
        ("filling", killed_when("h5py.Group.create_dataset", 11), 4),
        ("after it", killed_when("os.unlink", 4), 6),
        ("losses", killed_when("os.replace", 6), 9),
    ):
        case = "train.py gpt", 2, *TEXT, "--steps", 9, *files(tmp_path / name)
        done = drive(*case, "--every", 2, sabotage=sabotage, code=None if sabotage else 0)
        with named(name):
            assert step_of(tmp_path / name) == step
            if sabotage:
                assert done.returncode not in (0, 1, 2), done.stderr
                drive(*case, "--every", 5, "--resume")
            found = ended(tmp_path / name)
            assert found == (expected := expected or found)


# Plans of the survivors.


@goes_on
@pytest.mark.parametrize("method, heads, stages, shapes", [
    ("attention2d", 1, [("forward", [0], 0.05), ("backward", [3], 0.1), ("making", [1, 2], 0.07)],
     ["1x5x1", "2x2x1", "1x2x1"]),
    # Two grids of 1 x 3, then 1 x 5, as 5 is odd.
    ("attention2d", 2, [("backward", [2], 0.04), ("rows", [0, 4], 0.03), ("making", [1], 0.02)],
     ["1x5x1", "1x3x1", "1x2x1"]),
    # One after the other, the second while the first grid is made anew.
    ("ring", 1, [("shrink", [4, 0], 0.1), ("forward", [0, 1, 2], 0.05)], ["2x2x1", "1x1x1"]),
    # Only its neighbours wait for the dead rank: the wait of the others must be ended.
    ("ring", 1, [("program", [0], 0)], ["1x5x1"]),
    ("triangle", 1, [("forward", [5], 0.05)], ["1x3x1"]),
])  # fmt: skip
def test_survivors_go_on(tmp_path, method, heads, stages, shapes):
    """All survivors hear of a loss soon, and compute what their new grid computes."""
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
    done = launch(ranks, "-c", PROGRAM + code, timeout=40, options=ULFM, code=None)
    assert done.stdout.splitlines()[: len(lines)] == lines, done.stdout + done.stderr


# Drivers with --survive.

# After a call rank 3 dies, rank 1 hears of it, and the others go on as if nothing had happened.
UNEVEN = """
import signal
{}
old = owner.{name}
def new(self, *args, **kwargs):
    result = old(self, *args, **kwargs)
    if {} and MPI.COMM_WORLD.Get_failed().size == 0:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            MPI.COMM_WORLD.recv(source=3)
    return result
owner.{name} = new
"""


@goes_on
@pytest.mark.parametrize("stages, ranks", [
    # The first rank while it writes, then a rank of the smaller grid, then two at the end.
    ([("checkpoint", 1, [0], 0.0), ("backward", 3, [4], 0.001), ("evaluation", 1, [1, 2], 0.002)],
     2),
    # A node of three ranks, then another rank while the grid is made anew, then all but one.
    ([("forward", 2, [3, 4, 5], 0.0), ("repair", 1, [0], 0.001), ("making", 1, [1], 0.0)], 1),
])  # fmt: skip
def test_training_goes_on(tmp_path, stages, ranks):
    """A training has the bits of one on the same grids in the same steps."""
    done = survive("train.py gpt", folder := tmp_path / "run", stages, *TRAINING, *files(folder))
    assert problem_of(folder, done) == "", done.stdout + done.stderr
    left = re.findall(r"continues without .*: (\d+) ranks", done.stderr)
    assert int(left[-1]) == ranks and "continues after step" in done.stderr
    with h5py.File(folder / "out.h5") as file:
        assert "loss" in file["held_out"].attrs


@goes_on
@pytest.mark.parametrize("owner, name, when", [
    ("from a2d_mpi.experiments.train_gpt import Trainer as owner", "__init__", "True"),
    # The others begin a step.
    ("from a2d_mpi.experiments.train_gpt import Trainer as owner", "_keep_if_due",
     "self.state.step == 3"),
    # Only some have sent to their column, and the smaller grid has none.
    ("from a2d_mpi.comm.agreement import PlanCall as owner", "agree",
     "self.action == 'backward'"),
])  # fmt: skip
def test_some_go_on_at_first(tmp_path, owner, name, when):
    """If a call ends well on some ranks only, all repeat the same step."""
    options = *TRAINING, *files(tmp_path), "--survive"
    sabotage = UNEVEN.format(owner, when, name=name)
    done = drive("train.py gpt", 4, *options, sabotage=sabotage, timeout=90, mpi=ULFM)
    assert "continues without rank 3" in done.stderr
    assert trained_badly(tmp_path) == ""


# A driver has written everything.  Ranks die before the last agreement, between this agreement and
# their exit, or while the others leave.
END = """
import a2d_mpi.experiments.cli as cli, atexit, signal, time
moment, victims = {!r}, {!r}
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
"""


@goes_on
@pytest.mark.parametrize(
    "moment, victims",
    [("agreeing", [2]), ("agreed", [0]), ("agreed", [1, 2]), ("leaving", [0]), ("leaving", [2])],
)
def test_who_dies_at_the_end_changes_nothing(tmp_path, moment, victims):
    """A finished job ends with exit code 0."""
    options = *TRAINING, *files(tmp_path), "--survive"
    sabotage = END.format(moment, victims)
    done = drive("train.py gpt", 3, *options, sabotage=sabotage, timeout=90, mpi=ULFM)
    assert "Traceback" not in done.stderr and "continues" not in done.stderr
    assert trained_badly(tmp_path) == ""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    drive("train.py gpt", 2, *TRAINING, "--folder", folder, timeout=60)
    return folder


@goes_on
def test_answers_go_on(tmp_path, model):
    """Tokens are the same, with less room for waiting requests after each loss."""
    options = [model, *ASKING, "--tokens", 20, "--kv-block", 4]
    answers = answers_of(drive("generate.py", 2, *options, timeout=60))
    stages = [("step", 5, [0], 0.0), ("step", 4, [2, 3], 0.001), ("making", 1, [5], 0.0)]
    options += ["--room", "4,4,4,4,4,4"]
    done = survive("generate.py", tmp_path / "run", stages, *options)
    assert problem_of(tmp_path / "run", done, answers) == "", done.stdout + done.stderr
    assert len(answers) == len(PROMPTS) and "continues without" in done.stderr


@launches
def test_refused_where_jobs_end(tmp_path, model):
    """--survive is refused before any output if MPI ends jobs."""
    train = "train.py gpt", 2, *TRAINING, *files(tmp_path)
    for words in (train, ("generate.py", 2, model, "--prompt", "a")):
        done = drive(*words, "--survive", code=2)
        assert "needs Open MPI with ULFM" in done.stderr and done.stderr.count("error:") == 1
    assert not [*tmp_path.iterdir()]


@goes_on
def test_without_the_option_the_job_ends(tmp_path):
    """Without --survive the job ends, even if MPI continues."""
    sabotage = "from a2d_mpi.experiments.train_gpt import Trainer\n"
    sabotage += "if rank == 1: Trainer.step = lambda *_: os.kill(os.getpid(), 9)"
    done = drive("train.py gpt", 3, *TRAINING, *files(tmp_path), sabotage=sabotage, mpi=ULFM,
                 code=70)  # fmt: skip
    assert "continues" not in done.stderr
