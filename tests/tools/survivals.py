"""Kill ranks of drivers at random moments: the others have to go on, with Open MPI's ULFM.

    nice python tests/tools/survivals.py --jobs 100 --seed 0
    nice python tests/tools/survivals.py --jobs 20 --program generate.py
    nice python tests/tools/survivals.py --jobs 50 --end

Each job has 6 ranks and up to four losses, of 1 to 3 ranks each, in random phases
(tests/support/dying.py).  With --end it has one loss, of 1 to 5 ranks in its last 50 ms.

A job counts if it ends by itself with exit code 0 and without a traceback, goes on within 10 s of
each loss, leaves no process and no file that is damaged or temporary, and comes to the bits of a
training that was on the same grids in the same steps from the start; or, generate.py, to the same
answers as without a loss.  A table by phase, and the seconds of repairs; exit code 1 if any job
failed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import h5py
from dying import result_hash
from helpers import DRIVERS, NO_NUMBA, ROOT, SABOTAGE, launch
from test_ulfm import ULFM, left_behind

from a2d_mpi.experiments.checkpoint import latest

# Where Open MPI 5.0.11 itself crashes if a rank dies while others make a communicator.
CRASH = "ompi_comm_revoke_local"
DYING = Path(__file__).with_name("dying.py")
TEXT = ROOT / "LICENSE"
TRAINING = ("forward", "backward", "making", "checkpoint", "evaluation", "repair")
DECODING = ("forward", "making", "step", "repair")
ENDING = ("end", "exit")
STEPS = 24
MODEL = ("--layers", "1", "--width", "16", "--nheads", "4", "--seqlen", "64")
OPTIONS = (str(TEXT), *MODEL, "--separator", r"\n\n", "--validate", "0.2",
           "--warmup-steps", "5", "--steps", str(STEPS), "--every", "4",
           "--kernel", "numpy")  # fmt: skip
PROMPTS = ("So ", "The ranks", "A", "On a machine")
TOKENS = 30


def stages_of(choice, phases):
    """Stages of a job of 6 ranks, of which at least one is left."""
    left, stages = list(range(6)), []
    while len(left) > 1 and len(stages) < 4:
        phase = choice.choice(phases[:-1] if not stages else phases)
        if stages and stages[-1][0] == "evaluation":
            phase = "evaluation"  # the training is over
        victims = choice.sample(left, min(len(left) - 1, choice.randint(1, 3)))
        left = [x for x in left if x not in victims]
        seconds = choice.choice([0, 0.001, 0.004, 0.02]) * choice.random()
        call = 1 if phase in ("repair", "evaluation") else choice.randint(1, 3)
        stages.append((phase, call, victims, seconds))
    return stages


def end_of(choice, phases):
    """Stage of a job of 6 ranks, some of which die at its end."""
    victims = choice.sample(range(6), choice.randint(1, 5))
    return [(choice.choice(phases), 1, victims, choice.choice([0, 0.01, 0.05]) * choice.random())]


def survive(program, folder, stages, *options, timeout=90):
    """Run a driver whose ranks die; again if Open MPI itself crashed."""
    notes = folder / "notes"
    code = f"sys.path.insert(0, {str(DYING.parent)!r}); import dying; " \
           f"dying.arm({str(notes)!r}, {stages!r})"  # fmt: skip
    name, *command = program.split()
    code = SABOTAGE.format(NO_NUMBA, code, driver=str(DRIVERS / name))
    words = "-c", code, *command, *options, "--survive"
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        notes.mkdir(parents=True)
        done = launch(6, *words, timeout=timeout, options=ULFM, code=None)
        if CRASH not in done.stderr:
            break
        print(f"Open MPI crashed in {CRASH}: once more")
    return done


@cache
def hash_of(ranges):
    """The hash of a training without losses on these grids."""
    with tempfile.TemporaryDirectory() as folder:
        options = json.dumps([*OPTIONS, "--folder", folder])
        done = launch(6, DYING, options, json.dumps(ranges), timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def times_of(notes, event):
    """Times of an event on all ranks, sorted."""
    return sorted(int(x.name.split("-")[-1]) / 1e9 for x in notes.glob(f"{event}-*"))


def waits(notes):
    """For each death the seconds until somebody noticed, and until somebody went on."""
    noticed, on = times_of(notes, "noticed"), times_of(notes, "goes_on")
    after = lambda times, died: min((x - died for x in times if x > died), default=None)  # noqa: E731
    return [(after(noticed, x), after(on, x)) for x in times_of(notes, "died")]


def trained_badly(folder):
    """What is wrong with a training, or nothing."""
    state, refused = latest(folder / "checkpoints")
    left = [x.name for x in (folder / "checkpoints").iterdir() if x.name.startswith(".")]
    if refused or left or state is None or state.step != STEPS:
        return f"checkpoints: {refused or left or state}"
    with h5py.File(folder / "out.h5") as file:
        groups = [file["ranges"][x].attrs for x in sorted(file["ranges"], key=int)]
        ranges = [tuple(int(x[y]) for y in ("end", "ranks", "rows", "cols")) for x in groups]
        losses = file["loss"][()]
    if result_hash(losses, state.weights) != hash_of(tuple(ranges)):
        return f"other results than on {ranges} from the start"
    return ""


def problem_of(program, folder, done, stages, answers):
    """What is wrong with a job, or nothing."""
    if done.returncode:
        return f"exit code {done.returncode}"
    times = waits(folder / "notes")
    if not times and stages[0][0] not in ENDING:  # there it may have left before
        return "nobody died"
    if "Traceback" in done.stderr:
        return "a traceback"
    if any(on is not None and on > 10 for _, on in times):
        return f"went on after {times} s"
    if left_behind(folder):
        return "left processes"
    if program == "generate.py":
        return "" if lines_of(done) == answers else f"other answers: {lines_of(done)}"
    return trained_badly(folder)


def lines_of(done):
    """Answers by request.  An answer may be printed twice if the rank that printed it died."""
    return dict(re.findall(r"^(\d+): (.*)$", done.stdout, re.MULTILINE))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    programs = {"train.py gpt": (TRAINING, ENDING), "generate.py": (DECODING, ENDING[1:])}
    parser.add_argument("--program", choices=programs, default="train.py gpt")
    parser.add_argument("--end", action="store_true", help="kill ranks at the end of jobs only")
    args = parser.parse_args()
    phases = programs[args.program][args.end]
    deaths, bad, notices, repairs, failed, hung = Counter(), Counter(), [], [], 0, 0
    with tempfile.TemporaryDirectory() as top:
        top, answers, options = Path(top), {}, ()
        if args.program == "generate.py":
            folder = top / "model"
            command = DRIVERS / "train.py", "gpt", *OPTIONS, "--folder", folder
            launch(2, *command, timeout=100)
            options = (folder, "--tokens", TOKENS, "--temperature", 0.8, "--arrive", "0,0,9,15",
                       *(y for x in PROMPTS for y in ("--prompt", x)))  # fmt: skip
            answers = lines_of(launch(2, DRIVERS / "generate.py", *options, timeout=100))
            assert len(answers) == len(PROMPTS)
        for number in range(args.jobs):
            choice, folder = random.Random(f"{args.seed} {number}"), top / str(number)
            stages = end_of(choice, phases) if args.end else stages_of(choice, phases)
            if args.program == "train.py gpt":
                options = *OPTIONS, "--folder", folder / "checkpoints"
                options += "--output", folder / "out.h5"
            try:
                done = survive(args.program, folder, stages, *options)
                problem = problem_of(args.program, folder, done, stages, answers)
            except subprocess.TimeoutExpired as error:
                problem, done, hung = "a hang", error, hung + 1
            times = waits(folder / "notes")
            notices += [x for x, _ in times if x is not None]
            repairs += [x for _, x in times if x is not None]
            for phase in phases:
                died = len(times_of(folder / "notes", f"died-{phase}"))
                deaths[phase] += died
                bad[phase] += died * bool(problem)
            if problem:
                failed += 1
                print(f"job {number}: {stages}: {problem}")
                texts = (x if isinstance(x, str) else (x or b"").decode()
                         for x in (done.stdout, done.stderr))  # fmt: skip
                print(*texts, flush=True)
    print(f"{args.jobs} jobs, {failed} failed, {hung} of them hung")
    for phase in phases:
        print(f"{phase:10s} {deaths[phase]:5d} kills, {bad[phase]} of them in jobs that failed")
    for what, times in (("noticed by the first", notices), ("went on", repairs)):
        if times:
            middle = statistics.median(times)
            print(f"{what}: median {middle:.3f} s, slowest {max(times):.3f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
