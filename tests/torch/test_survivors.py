"""Models and drivers whose ranks die: with ULFM the others go on.

Needs the extra `torch`, and Open MPI: `bash jobs/test.sh torch`.
"""

import re
from functools import partial
from pathlib import Path

import h5py
import pytest
from helpers import assert_each_refused, drive
from killing import (
    ASKING,
    PROMPTS,
    TRAINING,
    ULFM,
    answered,
    answers_of,
    files,
    hashes,
    lose,
    problem_of,
    survive,
    trained_badly,
    what_was_lost,
)

LOSING = Path(__file__).with_name("losing.py")
launches = pytest.mark.launches
more = partial(pytest.param, marks=pytest.mark.thorough)  # `bash jobs/test.sh torch` runs it


def goes_on(test):
    """Mark a test of a job that continues when ranks die."""
    return launches(pytest.mark.ulfm(test))


@goes_on
@pytest.mark.parametrize("stages", [
    [("sums", [1], 0.02), ("step", [3], 0.1), ("goes_on", [0], 0.1)],
    more([("generate", [4], 0.05), ("making", [0, 1], 0.1), ("shrink", [0], 0.1)]),
])  # fmt: skip
def test_a_model_goes_on(tmp_path, stages):
    """Gradients and tokens on a smaller grid are those of a new one, with the same weights."""
    done = lose(tmp_path, stages, timeout=300, ranks=5, program=LOSING)
    problem, told = what_was_lost(done, "attention2d", stages, LOSING)
    assert not problem, done.stdout + done.stderr
    left = [5 - sum(len(x) for _, x, _ in stages[: i + 1]) for i in range(len(stages))]
    assert len(told) >= sum(left)
    shapes = {4: "2x2x1", 3: "1x3x1", 2: "1x2x1", 1: "1x1x1"}
    assert [x for x, _ in hashes(done)] == [shapes[x] for x in left]


@goes_on
@pytest.mark.parametrize("stages, ranks", [
    # The first rank while it writes, then a rank of the smaller grid, then two at the end.
    ([("checkpoint", 1, [0], 0.0), ("sums", 2, [4], 0.001), ("evaluation", 1, [1, 2], 0.002)],
     2),
    # A node of three ranks, then another rank while the grid is made anew, then all but one.
    more([("backward", 2, [3, 4, 5], 0.0), ("repair", 1, [0], 0.001), ("making", 1, [1], 0.0)], 1),
])  # fmt: skip
def test_training_goes_on(tmp_path, stages, ranks):
    """A training has the bits of one on the same grids in the same steps."""
    done = survive("train.py", folder := tmp_path / "run", stages, *TRAINING, *files(folder))
    assert problem_of(folder, done) == "", done.stdout + done.stderr
    assert trained_badly(folder) == ""
    left = re.findall(r"continues without .*: (\d+) ranks", done.stderr)
    assert int(left[-1]) == ranks and "continues after step" in done.stderr
    with h5py.File(folder / "out.h5") as file:
        assert "loss" in file["held_out"].attrs


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
@pytest.mark.parametrize("owner, name, when", [
    # The others begin a step.
    ("from a2d_mpi.experiments.train import Trainer as owner", "_keep_if_due",
     "self.state.step == 3"),
    # The others have the sums.
    more("from a2d_mpi.torch import GradientHooks as owner", "finish", "True"),
])  # fmt: skip
def test_some_go_on_at_first(tmp_path, owner, name, when):
    """If a call ends well on some ranks only, all repeat the same step."""
    options = *TRAINING, *files(tmp_path), "--survive"
    sabotage = UNEVEN.format(owner, when, name=name)
    done = drive("train.py", 4, *options, sabotage=sabotage, timeout=300, mpi=ULFM)
    assert "continues without rank 3" in done.stderr
    assert trained_badly(tmp_path) == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of checkpoints of a training, so that answers are texts."""
    path = tmp_path_factory.mktemp("model")
    drive("train.py", 1, *TRAINING, "--folder", path, timeout=200)
    return path


@goes_on
@pytest.mark.parametrize("stages, first", [
    ([("step", 90, [3, 5], 0.0), ("forward", 1, [2], 0.0)], True),
    more([("step", 90, [0], 0.0), ("making", 1, [4], 0.001), ("step", 40, [1], 0.0)], False),
])  # fmt: skip
def test_answers_go_on(tmp_path, folder, stages, first):
    """Texts are those without a loss; if the rank dies that prints one, it is printed again."""
    options = [
        folder,
        *ASKING,
        "--tokens",
        40,
        "--temperature",
        0.5,
        "--room",
        "90,90,90,90,90,90",
    ]
    expected = answers_of(drive("generate.py", 1, *options[:-2], timeout=200))
    done = survive("generate.py", tmp_path / "run", stages, *options)
    assert problem_of(tmp_path / "run", done) == "", done.stdout + done.stderr
    assert done.stderr.count("continues without") == len(stages), done.stderr
    assert len(expected) == len(PROMPTS) and min(map(len, expected)) > 20
    assert answers_of(done) == expected or (not first and answered(done, expected)), done.stdout


@launches
def test_refused_where_jobs_end(tmp_path):
    """--survive is refused before any output if MPI ends jobs."""
    train, ask = [*TRAINING, *files(tmp_path)], ["llama-tiny", "--prompt", "a"]
    cases = [("train.py", train), ("generate.py", ask)]
    said = "needs Open MPI with ULFM"
    assert_each_refused([(x, [*y, "--survive"], [], said) for x, y in cases], 2)
    assert not [*tmp_path.iterdir()]


@goes_on
def test_without_the_option_the_job_ends(tmp_path):
    """Without --survive the job ends, even if MPI continues."""
    sabotage = "from a2d_mpi.experiments.train import Trainer\n"
    sabotage += "if rank == 1: Trainer.step = lambda *_: os.kill(os.getpid(), 9)"
    done = drive("train.py", 3, *TRAINING, *files(tmp_path), sabotage=sabotage, mpi=ULFM,
                 code=70)  # fmt: skip
    assert "continues" not in done.stderr
