"""Start jobs whose ranks are killed or kill themselves, and judge what becomes of them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache, partial
from math import prod
from pathlib import Path

import psutil
from dying import times_of
from helpers import DRIVERS, ENVIRONMENT, MPIEXEC, ROOT, drive, launch

ULFM = ("--with-ft", "ulfm")
DYING = Path(__file__).with_name("dying.py")
# Where Open MPI 5.0.11 itself crashes if a rank dies while others make a communicator.
CRASH = "ompi_comm_revoke_local"


# Jobs that are killed from outside.


def start(ranks, *options, program="bench.py"):
    """Start a driver, and do not wait for it."""
    driver, *command = program.split()
    words = *MPIEXEC, "-n", ranks, sys.executable, DRIVERS / driver, *command, *options
    return subprocess.Popen(
        [str(x) for x in words],
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def arguments(process):
    """Return the arguments of a process; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def family(job):
    """Return a job's launcher with all processes that came from it, and its ranks."""
    launcher = psutil.Process(job.pid)  # a zombie at least, until somebody has waited for it
    below = launcher.children(recursive=True)
    ranks = [x for x in below if arguments(x)[:1] == [sys.executable]]
    return [launcher, *below], ranks


def kill(processes):
    for x in processes:
        with suppress(psutil.NoSuchProcess):
            x.kill()


def left_behind(folder):
    """Return processes that have the folder among their arguments."""
    return [x for x in psutil.process_iter() if str(folder) in arguments(x)]


# Plans whose ranks die.


def lose(folder, stages, *more, ranks=6, program=DYING):
    """Run the stages of `dying.lose`, and wait until no process is left."""
    command = program, "lose", folder, json.dumps(stages), *more
    done = launch(ranks, *command, options=ULFM, code=None)
    while left_behind(folder):  # what mpiexec has killed may take a moment
        time.sleep(0.1)
    return done


def hashes(done):
    """Return the shapes of the grids, and the hashes of the results on them."""
    return re.findall(r"^hash (\S+) (\w+)", done.stdout, re.MULTILINE)


@cache
def hashes_from_the_start(method):
    """Return the hashes of results on new grids, by shape."""
    heads = (1, 2) if method == "attention2d" else (1,)
    jobs = [launch(5, DYING, "whole", method, x) for x in heads]
    return {shape: found for done in jobs for shape, found in hashes(done)}


def what_was_lost(done, method, stages, expected=None):
    """Return what is wrong with a job of `lose`, or ""; and the seconds until ranks were told.

    `expected` are hashes of results by the shapes of grids.
    """
    told = re.findall(r"^\w+ lost .* after (\S+)$", done.stdout, re.MULTILINE)
    told, found = list(map(float, told)), hashes(done)
    if done.returncode:
        return f"exit code {done.returncode}", told
    if len(found) != len(stages):
        return f"{len(found)} of {len(stages)} stages", told
    expected = expected or hashes_from_the_start(method)
    return "".join(f"other results on {x}; " for x, y in found if expected[x] != y), told


# Drivers that go on without ranks that die.

STEPS = 24
PROMPTS = "The ", "Copyright and permission notice " * 3  # the second one is long enough for plans
TRAINING = ("llama-tiny", str(ROOT / "LICENSE"), "--seqlen", "64", "--separator", r"\n\n",
            "--validate", "0.2", "--set", "learning_rate=0.01", "--set", "save_steps=4", "--steps",
            str(STEPS), "--kernel", "numpy", "--check", "none")  # fmt: skip
ASKING = tuple(word for x in PROMPTS for word in ("--prompt", x))


def files(folder):
    """Return the options for the files of a training in a folder, which is made."""
    folder.mkdir(exist_ok=True)
    return ["--folder", folder / "checkpoints", "--output", folder / "out.h5"]


def survive(program, folder, stages, *options, sabotage=""):
    """Run a driver whose ranks die, see `dying.arm`; again if Open MPI itself crashed."""
    notes = folder / "notes"
    arm = f"sys.path.insert(0, {str(DYING.parent)!r})\n" \
          f"import dying; dying.arm({str(notes)!r}, {stages!r})\n{sabotage}"  # fmt: skip
    run = partial(drive, program, 6, *options, "--survive", sabotage=arm, mpi=ULFM, code=None)
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        notes.mkdir(parents=True)
        done = run()
        if CRASH not in done.stderr:
            break
        print(f"Open MPI crashed in {CRASH}: once more")
    return done


def waits(notes):
    """Return for each death the seconds until somebody noticed, and until somebody went on."""

    def after(event, died):
        return min((x - died for x in times_of(notes, event) if x > died), default=None)

    return [(after("noticed", x), after("goes_on", x)) for x in times_of(notes, "died")]


def trained_badly(folder, done):
    """Return what is wrong with a training whose ranks died, or "".

    It must come to the bits of a job on its last grid that resumes from the checkpoint it took.
    """
    from safetensors.numpy import load_file

    whole, again, last = folder / "checkpoints", folder / "again", f"checkpoint-{STEPS}"
    shape = re.findall(r"continues without .* ranks, (\d+)x(\d+)x(\d+),", done.stderr)[-1]
    taken = re.findall(r"resumes from .*/(checkpoint-\d+)$", done.stderr, re.MULTILINE)[-1:]
    again.mkdir()
    for name in taken:
        shutil.copytree(whole / name, again / name)
    grid = [x for name, n in zip(("--rows", "--cols", "--head-ranks"), shape) for x in (name, n)]
    ranks = prod(map(int, shape))
    drive("train.py", ranks, *TRAINING, *grid, "--folder", again, "--resume")
    left = [x.name for x in whole.iterdir() if x.name.startswith(".")]
    weights = [load_file(x / last / "model.safetensors") for x in (whole, again)]
    equal = all((x == weights[1][name]).all() for name, x in weights[0].items())
    return f"left {left}; " * bool(left) + f"other weights than from {taken} on" * (not equal)


def answers_of(done):
    """Return the answers of generate.py, without what is printed with them."""
    text = re.sub(r"(?m)^\d+ tokens of the prompt and .*$", "", done.stdout)
    return [" ".join(x.split()) for x in re.split(r"--- prompt \d+\n", text)[1:]]


def answered(done, expected):
    """Return True if all answers were printed; if the rank that prints dies, another one does."""
    return all(x in " ".join(answers_of(done)) for x in expected)


def problem_of(folder, done, may_end_first=False):
    """Return what is wrong with the end of a job whose ranks died, or ""."""
    if done.returncode:
        return f"exit code {done.returncode}"
    times = waits(folder / "notes")
    if not times and not may_end_first:
        return "nobody died"
    if "Traceback" in done.stderr:
        return "a traceback"
    return "left processes" if left_behind(folder) else ""
