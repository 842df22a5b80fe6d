"""Drivers continue when ranks die: training and answers, with ULFM."""

import re

import h5py
import pytest
from helpers import DRIVERS, drive, launch
from survivals import OPTIONS, PROMPTS, TEXT, lines_of, problem_of, survive, trained_badly
from test_ulfm import ULFM

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
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


@pytest.mark.launches
@pytest.mark.ulfm
@pytest.mark.parametrize(
    "stages, ranks",
    [
        # The first rank while it writes, then a rank of the smaller grid, then two at the end.
        (
            [
                ("checkpoint", 1, [0], 0.0),
                ("backward", 3, [4], 0.001),
                ("evaluation", 1, [1, 2], 0.002),
            ],
            2,
        ),
        # A node of three ranks, then another rank while the grid is made anew, then all but one.
        ([("forward", 2, [3, 4, 5], 0.0), ("repair", 1, [0], 0.001), ("making", 1, [1], 0.0)], 1),
    ],
)
def test_training_goes_on(tmp_path, stages, ranks):
    """A training has the bits of one on the same grids in the same steps."""
    folder = tmp_path / "run"
    options = *OPTIONS, "--folder", folder / "checkpoints", "--output", folder / "out.h5"
    done = survive("train.py gpt", folder, stages, *options)
    assert problem_of("train.py gpt", folder, done, stages, {}) == "", done.stdout + done.stderr
    left = re.findall(r"continues without .*: (\d+) ranks", done.stderr)
    assert int(left[-1]) == ranks and "continues after step" in done.stderr
    with h5py.File(folder / "out.h5") as file:
        assert "loss" in file["held_out"].attrs


@pytest.mark.launches
@pytest.mark.ulfm
@pytest.mark.parametrize(
    "owner, name, when",
    [
        ("from a2d_mpi.experiments.train_gpt import Trainer as owner", "__init__", "True"),
        (  # the others begin a step
            "from a2d_mpi.experiments.train_gpt import Trainer as owner",
            "_keep_if_due",
            "self.state.step == 3",
        ),
        (  # only some have sent to their column, and the smaller grid has none
            "from a2d_mpi.comm.rendezvous import PlanCall as owner",
            "agree",
            "self.action == 'backward'",
        ),
        ("import a2d_mpi.experiments.trace as owner", "measured", "True"),
    ],
)
def test_some_go_on_at_first(tmp_path, owner, name, when):
    """If a call ends well on some ranks only, all repeat the same step."""
    options = *OPTIONS, "--folder", tmp_path / "checkpoints", "--output", tmp_path / "out.h5"
    options += "--trace", tmp_path / "trace.json", "--survive"
    sabotage = UNEVEN.format(owner, when, name=name)
    done = drive("train.py gpt", 4, *options, sabotage=sabotage, timeout=90, mpi=ULFM)
    assert "continues without rank 3" in done.stderr
    assert trained_badly(tmp_path) == ""
    assert (tmp_path / "trace.json").exists() == (name != "measured")


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


@pytest.mark.launches
@pytest.mark.ulfm
@pytest.mark.parametrize(
    "moment, victims",
    [("agreeing", [2]), ("agreed", [0]), ("agreed", [1, 2]), ("leaving", [0]), ("leaving", [2])],
)
def test_who_dies_at_the_end_changes_nothing(tmp_path, moment, victims):
    """A finished job ends with exit code 0."""
    options = *OPTIONS, "--folder", tmp_path / "checkpoints", "--output", tmp_path / "out.h5"
    sabotage = END.format(moment, victims)
    done = drive("train.py gpt", 3, *options, "--survive", sabotage=sabotage, timeout=90, mpi=ULFM)
    assert "Traceback" not in done.stderr and "continues" not in done.stderr
    assert trained_badly(tmp_path) == ""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    launch(2, DRIVERS / "train.py", "gpt", *OPTIONS, "--folder", folder, timeout=60)
    return folder


@pytest.mark.launches
@pytest.mark.ulfm
def test_answers_go_on(tmp_path, model):
    """Tokens are the same, with less room for waiting requests after each loss."""
    prompts = [y for x in PROMPTS for y in ("--prompt", x)]
    options = [model, *prompts, "--tokens", 20, "--arrive", "0,0,9,12", "--kv-block", 4]
    answers = lines_of(launch(2, DRIVERS / "generate.py", *options, timeout=60))
    stages = [("step", 5, [0], 0.0), ("step", 4, [2, 3], 0.001), ("making", 1, [5], 0.0)]
    options += ["--room", "4,4,4,4,4,4"]
    done = survive("generate.py", tmp_path / "run", stages, *options)
    text = done.stdout + done.stderr
    assert problem_of("generate.py", tmp_path / "run", done, stages, answers) == "", text
    assert len(answers) == len(PROMPTS) and "continues without" in done.stderr


@pytest.mark.launches
def test_refused_where_jobs_end(tmp_path, model):
    """--survive is refused before any output if MPI ends jobs."""
    for program, first in (("train.py gpt", TEXT), ("generate.py", model)):
        more = ["--folder", tmp_path / "new"] if program == "train.py gpt" else ["--prompt", "a"]
        done = drive(program, 2, first, *more, "--survive", code=2)
        assert "needs Open MPI with ULFM" in done.stderr
        assert done.stderr.count("error:") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.launches
@pytest.mark.ulfm
def test_without_the_option_the_job_ends(tmp_path):
    """Without --survive the job ends, even if MPI continues."""
    options = *OPTIONS, "--folder", tmp_path / "checkpoints"
    sabotage = "from a2d_mpi.experiments.train_gpt import Trainer\n" \
               f"def step(*args):\n    if rank == 1:\n        {KILLED}\n    return old(*args)\n" \
               "old, Trainer.step = Trainer.step, step"  # fmt: skip
    done = drive("train.py gpt", 3, *options, sabotage=sabotage, mpi=ULFM, code=70)
    assert "continues" not in done.stderr
