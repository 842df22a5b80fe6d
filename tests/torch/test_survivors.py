"""Models and drivers whose ranks die: with ULFM the others go on.

Needs the extra `torch`, and Open MPI: `bash jobs/test.sh torch`.
"""

import re
from functools import cache, partial

import h5py
import pytest
import torch
from helpers import assert_each_refused, drive
from killing import (
    ASKING,
    PROMPTS,
    STEPS,
    TRAINING,
    ULFM,
    answered,
    answers_of,
    files,
    problem_of,
    survive,
    trained_badly,
)

from a2d_mpi.cli.models import checkpoint_of, open_model

launches = pytest.mark.launches
more = partial(pytest.param, marks=pytest.mark.thorough)  # `bash jobs/test.sh torch` runs it
# After gradients are averaged rank 3 dies, rank 1 hears of it, and the others go on as if nothing
# had happened.
UNEVEN = """
import signal
from a2d_mpi.torch import context
def add(*given, real=context.add_gradients):
    real(*given)
    if MPI.COMM_WORLD.Get_failed().size == 0:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            MPI.COMM_WORLD.recv(source=3)
context.add_gradients = add
"""
# The first rank while it writes, then a rank of the smaller grid, then one at the end.
FIRST = ("checkpoint", 2, (0,), 0.0), ("sums", 2, (4,), 0.001), ("evaluation", 1, (1,), 0.002)
# A node of two ranks, then another rank while the grid is made anew, then all but one.
SECOND = ("backward", 6, (4, 5), 0.0), ("repair", 1, (0,), 0.001), ("making", 1, (1,), 0.0)


def goes_on(test):
    """Mark a test of a job that continues when ranks die."""
    return launches(pytest.mark.ulfm(test))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains once, with ranks that die: the folder, and the process."""

    @cache
    def run(stages, sabotage=""):
        options = *TRAINING, *files(folder := tmp_path_factory.mktemp("training") / "run")
        return folder, survive("train.py", folder, stages, *options, sabotage=sabotage)

    return run


@goes_on
@pytest.mark.parametrize("given, ranks", [((FIRST,), 3), more((SECOND, UNEVEN), 1)])
def test_training_goes_on(trained, given, ranks):
    """A training goes on from its latest checkpoint, on a smaller grid."""
    folder, done = trained(*given)
    assert problem_of(folder, done) == "", done.stdout + done.stderr
    left = re.findall(r"continues without .*: (\d+) ranks", done.stderr)
    assert int(left[-1]) == ranks
    assert trained_badly(folder, done) == "", done.stderr
    with h5py.File(folder / "out.h5") as file:
        assert "loss" in file["held_out"].attrs and len(file["loss"]) == STEPS


def answers_of_one_process(folder):
    """Return the answers of plain transformers."""
    (model, tokenizer), found = open_model(checkpoint_of(folder / "checkpoints")), []
    for prompt in PROMPTS:
        torch.manual_seed(0)
        ids = torch.tensor([tokenizer.encode(prompt)])
        made = model.generate(ids, max_new_tokens=40, do_sample=True, temperature=0.5)
        found.append(" ".join(tokenizer.decode(made[0, ids.shape[1] :]).split()))
    return found


@goes_on
@pytest.mark.parametrize("stages, first", [
    ([("step", 90, [3, 5], 0.0), ("forward", 1, [2], 0.0)], True),
    more([("step", 90, [0], 0.0), ("making", 1, [4], 0.001), ("step", 40, [1], 0.0)], False),
])  # fmt: skip
def test_answers_go_on(tmp_path, trained, stages, first):
    """Texts are those without a loss; if the rank dies that prints one, it is printed again."""
    folder, _ = trained(FIRST)
    expected = answers_of_one_process(folder)
    options = ["--tokens", 40, "--temperature", 0.5, "--room", "90,90,90,90,90,90"]
    done = survive(
        "generate.py", tmp_path / "run", stages, folder / "checkpoints", *ASKING, *options
    )
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
    sabotage = "from a2d_mpi.commands.train_job import Notes\n"
    sabotage += "if rank == 1: Notes.on_step_begin = lambda *_, **__: os.kill(os.getpid(), 9)"
    done = drive("train.py", 3, *TRAINING, *files(tmp_path), sabotage=sabotage, mpi=ULFM,
                 code=70)  # fmt: skip
    assert "continues" not in done.stderr
