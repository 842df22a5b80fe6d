"""Models and drivers whose ranks die: with ULFM the others go on.

Needs the extra `torch`, and Open MPI: `bash jobs/test.sh torch`.
"""

import json
import re
from functools import cache, partial
from pathlib import Path

import h5py
import pytest
import torch
from helpers import assert_each_refused, drive, launch
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

from a2d_mpi.experiments.models import checkpoint_of, open_model

LOSING = Path(__file__).with_name("losing.py")
launches = pytest.mark.launches
more = partial(pytest.param, marks=pytest.mark.thorough)  # `bash jobs/test.sh torch` runs it
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
# When the others begin a step, and when they have the sums.
STEP = "from a2d_mpi.experiments.train import Trainer as owner", "self.state.step == 1"
SUMS = "from a2d_mpi.torch import GradientHooks as owner", "True"
STEP, SUMS = UNEVEN.format(*STEP, name="_keep_if_due"), UNEVEN.format(*SUMS, name="finish")
# The first rank while it writes, then a rank of the smaller grid, then one at the end.
FIRST = ("checkpoint", 5, [0], 0.0), ("sums", 2, [4], 0.001), ("evaluation", 1, [1], 0.002)
# A node of two ranks, then another rank while the grid is made anew, then all but one.
SECOND = ("backward", 6, [4, 5], 0.0), ("repair", 1, [0], 0.001), ("making", 1, [1], 0.0)


def goes_on(test):
    """Mark a test of a job that continues when ranks die."""
    return launches(pytest.mark.ulfm(test))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains once, with ranks that die: the folder, and the process."""

    @cache
    def run(stages, sabotage):
        stages = {"first": FIRST, "second": SECOND}[stages]
        options = *TRAINING, *files(folder := tmp_path_factory.mktemp("training") / "run")
        return folder, survive("train.py", folder, stages, *options, sabotage=sabotage)

    return run


@goes_on
@pytest.mark.parametrize("given, ranks, stages", [
    (("first", STEP), 2, [("sums", [1], 0.02), ("step", [3], 0.1), ("goes_on", [0], 0.1)]),
    more(("second", SUMS), 1,
         [("generate", [4], 0.05), ("making", [0, 1], 0.1), ("shrink", [0], 0.1)]),
])  # fmt: skip
def test_training_goes_on(tmp_path, trained, given, ranks, stages):
    """A training has the bits of one on the same grids in the same steps.

    If a call ends well on some ranks only, all repeat the same step.  Gradients and tokens of a
    model on a smaller grid are those of a new one, with the same weights.
    """
    folder, done = trained(*given)
    assert problem_of(folder, done) == "", done.stdout + done.stderr
    later = []
    assert trained_badly(folder, later) == ""
    left = re.findall(r"continues without .*: (\d+) ranks", done.stderr)
    assert int(left[-1]) == ranks and "continues without rank 3" in done.stderr
    assert "continues after step" in done.stderr
    with h5py.File(folder / "out.h5") as file:
        assert "loss" in file["held_out"].attrs

    lost = lose(tmp_path, stages, timeout=300, ranks=5, program=LOSING)
    ((grids, found),) = later
    whole = launch(6, LOSING, "whole", json.dumps(TRAINING), json.dumps([grids]), timeout=400)
    assert f"\n{found}\n" in whole.stdout, f"other results than on {grids} from the start"
    problem, told = what_was_lost(lost, "attention2d", stages, dict(hashes(whole)))
    assert not problem, lost.stdout + lost.stderr
    left = [5 - sum(len(x) for _, x, _ in stages[: i + 1]) for i in range(len(stages))]
    assert len(told) >= sum(left)
    shapes = {4: "2x2x1", 3: "1x3x1", 2: "1x2x1", 1: "1x1x1"}
    assert [x for x, _ in hashes(lost)] == [shapes[x] for x in left]


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
    folder, _ = trained("first", STEP)
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
    sabotage = "from a2d_mpi.experiments.train import Trainer\n"
    sabotage += "if rank == 1: Trainer.step = lambda *_: os.kill(os.getpid(), 9)"
    done = drive("train.py", 3, *TRAINING, *files(tmp_path), sabotage=sabotage, mpi=ULFM,
                 code=70)  # fmt: skip
    assert "continues" not in done.stderr
