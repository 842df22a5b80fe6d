"""Kill ranks, or raise errors in them, at random moments, and see what becomes of the jobs.

    nice python tests/tools/faults.py kills --jobs 100 --seed 0
    nice python tests/tools/faults.py survivals --jobs 20 --only generate.py

`kills`: a driver on two ranks is killed one to three times and started again with the same
options, until it ends.  A kill is a SIGKILL of the whole job ("all"), a SIGKILL of one rank
("rank"), or a SIGTERM of the launcher ("term").  Work that was finished before a kill must exist
after it, and the final results must equal an uninterrupted run bit for bit.

`losses` (Open MPI with ULFM): in a job of plans on 6 ranks 1 to 3 ranks kill themselves in up to
three random phases.  The others must hear of each loss within 10 s, and compute the results of new
grids of the same shape, bit for bit.

`survivals` (the same, and PyTorch): so do ranks of `train.py --survive`, up to four times; of
`generate.py`; or, "end", 1 to 5 ranks in the last 50 ms of a training.  A job must end with exit
code 0 and without a traceback, go on within 30 s of each loss, and leave no process and no file
that is damaged or temporary.  It must come to the bits of a training that was on the same grids in
the same steps from the start, or to the answers without a loss.

`raises`: one rank of a driver raises an error at the beginning of one call of a function of the
package.  The job must end in time.

`cost` kills nobody: it compares the seconds of a training step, on 2 ranks in turn, without and
with the fault tolerance of Open MPI, and with --survive.

A job depends on the seed and its number only.  The script prints each failed job, the numbers of
jobs by driver or phase, and medians.  The exit code is 1 if a job failed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import hashlib
import json
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from functools import cache, partial

import h5py
import numpy as np
from dying import ERRORS
from helpers import ROOT, SAMPLE, drive
from killing import (
    ASKING,
    DYING,
    TRAINING,
    ULFM,
    answered,
    answers_of,
    family,
    files,
    hashes_without_loss,
    kill,
    lose,
    problem_of,
    start,
    survive,
    trained_badly,
    waits,
    what_was_lost,
)

from a2d_mpi.experiments.checkpoint import RUN, latest, load

TOP = tempfile.TemporaryDirectory()  # of files that several jobs need
SECONDS = defaultdict(list)  # what is measured, by name
NUMPY = ["--kernel", "numpy"]  # Numba takes longer to import than most of these jobs
# Driver, ranks, options, and options for so much work that there is time to kill it.  "{}" is an
# empty folder, and "{model}" a folder of checkpoints.
DRIVERS = {
    "train": ("train.py", 2, ["llama-tiny", ROOT / "LICENSE", "--separator", "", "--seqlen", 64,
                              "--warmup-steps", 5, "--folder", "{}/run", "--output", "{}/log.h5"],
              ["--steps", 150, "--every", 1, "--resume", *NUMPY]),
    "generate": ("generate.py", 2, ["{model}", "--prompt", "So "],
                 ["--tokens", 300, "--temperature", 0.7]),
    "attention": ("attention.py", 2, [SAMPLE, "--backward", "--output", "{}/out.h5",
                                      "--save-outputs"], ["--seqlen", 256, "--trials", 3, *NUMPY]),
    "bench": ("bench.py", 2, ["--output", "{}/bench.h5", "--nheads", 2, "--headdim", 8],
              ["--trials", 2, "--seqlens", "64,65,66,67", "--plans", "all", "--resume", *NUMPY]),
    "linear": ("bench.py linear", 2, ["--output", "{}/linear.h5", "--nheads", 2, "--headdim", 8,
                                      "--seqlens", 64, "--trials", 2], []),
}  # fmt: skip
# In place of these, for jobs in which an error is raised.
LITTLE = {
    "train": ["--steps", 2], "generate": ["--tokens", 3],
    "attention": ["--seqlen", 64, "--trials", 2],
    "bench": ["--trials", 1, "--seqlens", 64, "--plans", "ring,attention2d:1x2"],
}  # fmt: skip
KILLED = [x for x in DRIVERS if x != "linear"]


@cache
def model():
    folder = Path(TOP.name, "model")
    drive("train.py", 1, *TRAINING, "--folder", folder, timeout=300)
    return folder


def options_of(name, folder, little=False):
    _, _, options, much = DRIVERS[name]
    words = [*options, *(LITTLE.get(name, much) if little else much)]
    words = [model() if x == "{model}" else x for x in words]
    return [str(x).replace("{}", str(folder)) for x in words]


# Kills.


def digest(x):
    """Return the digest of an HDF5 dataset, or of an array."""
    return hashlib.sha256(np.ascontiguousarray(x[()]).tobytes()).hexdigest()


# What differs between two runs: seconds, memory, where and when a run was, bytes since its start.
TIMES = "^traffic|activations|operator|second|tim[ei]|span|stamp|predicted|origin|ranges"


def contents(path, stamps=False):
    """Return all that an HDF5 file holds but times; `stamps`: the time of each result instead."""
    found = set()

    def visit(name, item):
        if stamps:
            if "utc_time" in item.attrs:
                found.add((name, str(item.attrs["utc_time"])))
        elif isinstance(item, h5py.Dataset) and not re.search(TIMES, name):
            found.add((name, digest(item)))
        elif "error" in item.attrs:  # of a check
            found.add((name, str(item.attrs["error"])))

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def done_in(name, folder):
    """Return the set of what a driver has finished in the folder; nothing may ever leave it."""
    if name == "train":
        _, state, refused = latest(folder / "run")
        assert not refused, refused
        return set(range(state.step)) if state else set()
    return set().union(*(contents(x, name == "bench") for x in folder.glob("*.h5")))


def bits_of(name, folder, stdout):
    """Return what a driver comes to in the end."""
    if name == "generate":
        return stdout.partition(" tokens of the prompt and ")[0]
    found = []
    for path in sorted(x for x in folder.rglob("*") if x.is_file()):
        if path.suffix == ".h5":
            found.append((path.name, sorted(contents(path))))
        elif path.name == RUN:
            found.append((path.parent.name, load(path.parent).losses))
        else:
            found.append((path.parent.name, path.name, path.read_bytes()))
    return found


def run_killed(name, folder, moment, kind, choice):
    """Run a driver that is killed after some seconds; return whether it was, and its stdout."""
    folder.mkdir(exist_ok=True)
    program, *_ = DRIVERS[name]
    job = start(2, *options_of(name, folder), program=program)
    try:
        with suppress(subprocess.TimeoutExpired):
            job.wait(moment or 200)
        if killed := job.poll() is None:
            everyone, ranks = family(job)
            if kind == "term":
                job.send_signal(signal.SIGTERM)
            else:
                kill([choice.choice(ranks)] if kind == "rank" and ranks else everyone)
        stdout, stderr = job.communicate(timeout=60)
    finally:
        kill(family(job)[0] if job.poll() is None else [])
    if job.returncode and (moment is None or "error:" in stderr):
        raise RuntimeError(f"{name} ended with {job.returncode}: {stderr[-2000:]}")
    return killed, stdout


@cache
def uninterrupted(name):
    """Return what a driver comes to, and its seconds."""
    folder, began = Path(TOP.name, name), time.monotonic()
    _, stdout = run_killed(name, folder, None, "", random)
    return bits_of(name, folder, stdout), time.monotonic() - began


def kills(choice, folder, only):
    name, before, labels = choice.choice(only or KILLED), set(), []
    expected, seconds = uninterrupted(name)
    folder, killed = folder / name, True
    kinds = [choice.choice(("all", "rank", "term")) for _ in range(choice.randint(1, 3))]
    while killed:
        kind, kinds = (kinds[0], kinds[1:]) if kinds else ("", [])
        # Half of the moments are late: the first seconds are the start of Python.
        moment = choice.uniform(choice.choice([0.1, 0.5]) * seconds, seconds) if kind else None
        killed, stdout = run_killed(name, folder, moment, kind, choice)
        labels += [f"{name} {kind}"] * killed
        after = done_in(name, folder)
        if not before <= after:
            return labels, f"lost after {labels}: {before - after}"
        before = after
    return labels, "" if bits_of(name, folder, stdout) == expected else f"differs after {labels}"


# Losses.

PHASES = ("forward", "backward", "making", "rows", "grid", "shrink")
METHODS = ("attention2d", "ring", "double ring", "triangle")


def losses(choice, folder, only):
    method, left, stages = choice.choice(METHODS), 6, []
    heads = choice.choice((1, 2)) if method == "attention2d" else 1
    while left > 1 and len(stages) < 3 and (method != "triangle" or left == 6):
        phase = choice.choice(only or PHASES)
        victims = choice.sample(range(left), min(left - 1, choice.randint(1, 3)))
        stages.append((phase, victims, choice.uniform(0, 0.1)))
        left -= len(victims)
    done = lose(folder, stages, method, heads, timeout=40)
    problem, told = what_was_lost(done, method, stages)
    SECONDS["told"] += told
    text = f"{method}, {heads} heads, {stages}: {problem}\n{done.stdout}{done.stderr}"
    return [phase for phase, *_ in stages], text if problem else ""


# Survivals.

SURVIVORS = {
    "train.py": ("forward", "backward", "making", "sums", "checkpoint", "evaluation", "repair"),
    "generate.py": ("forward", "making", "step", "repair"),
    "end": ("end", "exit"),
}


TRAININGS = []  # grids of each job, and the hash that it came to; they are compared at the end


@cache
def generation():
    """Return options of generate.py, and the answers without a loss."""
    options = [model(), *ASKING, "--tokens", 40, "--temperature", 0.8]
    return options, answers_of(drive("generate.py", 2, *options, timeout=300))


def stages_of(choice, phases):
    """Return stages of a job of 6 ranks, of which at least one is left."""
    if phases == SURVIVORS["end"]:
        victims = choice.sample(range(6), choice.randint(1, 5))
        seconds = choice.choice([0, 0.01, 0.05]) * choice.random()
        return [(choice.choice(phases), 1, victims, seconds)]
    left, stages = list(range(6)), []
    once = {"repair", "evaluation"}
    if phases == SURVIVORS["generate.py"]:  # which reads all prompts at once
        once |= {"forward", "making"}
    while len(left) > 1 and len(stages) < 4:
        phase = choice.choice(phases if stages else phases[:-1])
        if stages and stages[-1][0] == "evaluation":
            phase = "evaluation"  # the training is over
        victims = choice.sample(left, min(len(left) - 1, choice.randint(1, 3)))
        left = [x for x in left if x not in victims]
        seconds = choice.choice([0, 0.001, 0.004, 0.02]) * choice.random()
        call = 1 if phase in once else choice.randint(1, 3)
        stages.append((phase, call, victims, seconds))
    return stages


def survivals(choice, folder, only):
    kind = choice.choice(only or list(SURVIVORS))
    stages = stages_of(choice, SURVIVORS[kind])
    if kind == "generate.py":
        options, answers = generation()
        done = survive(kind, folder, stages, *options)
        problem = problem_of(folder, done)
        if not problem and not answered(done, answers):
            problem = f"other answers: {answers_of(done)}"
    else:
        done = survive("train.py", folder, stages, *TRAINING, *files(folder))
        problem = problem_of(folder, done, may_end_first=kind == "end")
        problem = problem or trained_badly(folder, TRAININGS)
    for noticed, on in waits(folder / "notes"):
        SECONDS["noticed by the first"] += [noticed] * (noticed is not None)
        SECONDS["went on"] += [on] * (noticed is not None and on is not None)
    labels = [x.name.split("-")[1] for x in (folder / "notes").glob("died-*")]
    return labels, f"{stages}: {problem}\n{done.stdout}{done.stderr}" if problem else ""


# Errors.

LIMIT = 20  # seconds beyond twice the usual, after which a job counts as hanging


def run_raising(name, folder, timeout, *armed):
    """Run a driver; return the process that ended, and the texts of the notes."""
    program, ranks, *_ = DRIVERS[name]
    (notes := folder / "notes").mkdir(parents=True)
    arm = f"sys.path.insert(0, {str(DYING.parent)!r})\n" \
          f"import dying; dying.raise_in(*{(str(notes), *armed)!r})"  # fmt: skip
    options = options_of(name, folder, little=True)
    done = drive(program, ranks, *options, sabotage=arm, timeout=timeout, code=None)
    return done, {x.name: x.read_text() for x in notes.iterdir()}


@cache
def calls_of(name):
    """Return rank, function and number of calls, for all ranks of a driver; and its seconds."""
    done, notes = run_raising(name, Path(TOP.name, f"calls-{name}"), 100, -1, "", 0, "")
    assert done.returncode == 0, done.stderr
    calls = {int(rank): json.loads(x) for rank, x in notes.items()}
    return [(rank, *x) for rank, y in calls.items() for x in y.items()], done.seconds


def raises(choice, folder, only):
    name, error = choice.choice(only or list(DRIVERS)), choice.choice(sorted(ERRORS))
    calls, usual = calls_of(name)
    rank, function, number = choice.choice(calls)
    call = choice.choice((1, choice.randint(1, number)))
    said = f"{name}: {error} on rank {rank} in call {call} of {function}"
    try:
        done, notes = run_raising(name, folder, 2 * usual + LIMIT, rank, function, call, error)
    except subprocess.TimeoutExpired:
        return [f"{name} hangs"], f"{said}: hangs"
    lines = " | ".join(x for x in done.stderr.splitlines() if ".py: " in x)
    print(f"{said}: exit code {done.returncode}, {done.seconds:.1f} s: {lines[:160]}", flush=True)
    SECONDS["beyond the usual"].append(done.seconds - usual)
    verdict = "ends" if done.returncode else "handles it"
    return [f"{name} {verdict if 'raised' in notes else 'does not raise'}"], ""


# What going on costs as long as nobody dies.

WAYS = {"without": ((), ()), "ulfm": (ULFM, ()), "ulfm, --survive": (ULFM, ("--survive",))}


def cost(choice, folder, only):
    seconds = {}
    for name in choice.sample(list(WAYS), len(WAYS)):
        mpi, more = WAYS[name]
        options = ["llama-tiny", ROOT / "LICENSE", "--seqlen", 256, "--steps", 60, "--every", 60,
                   "--separator", r"\n\n", *files(folder / name), *more]  # fmt: skip
        drive("train.py", 2, *options, mpi=mpi, timeout=300, numba=True)
        with h5py.File(folder / name / "out.h5") as file:
            seconds[name] = float(np.median(file["seconds/total"][5:]))  # without the first ones
    for name, x in seconds.items():
        SECONDS[f"a step, {name}"].append(x)
        SECONDS[f"ratio, {name}"].append(x / seconds["without"])
    return [], ""


KINDS = {"kills": KILLED, "losses": PHASES, "survivals": SURVIVORS, "raises": DRIVERS, "cost": ()}


def main(argv=None) -> int:
    """Run jobs and print the tables; return the exit code."""
    parser = argparse.ArgumentParser("faults.py", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="kind", required=True)
    for kind, only in KINDS.items():
        command = commands.add_parser(kind)
        command.add_argument("--jobs", type=int, default=20)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--only", choices=list(only), nargs="+", help="drivers or phases")
    args = parser.parse_args(argv)
    trial, jobs, bad, failed = (
        partial(globals()[args.kind], only=args.only),
        Counter(),
        Counter(),
        0,
    )
    for number in range(args.jobs):
        folder = Path(tempfile.mkdtemp(prefix=f"job-{number}-", dir=TOP.name))
        try:
            labels, problem = trial(random.Random(f"{args.seed} {number}"), folder)
        except subprocess.TimeoutExpired as error:
            labels, problem = ["hangs"], f"{error}\n{error.stdout}\n{error.stderr}"
        jobs.update(labels)
        bad.update(labels * bool(problem))
        failed += bool(problem)
        if problem:
            print(f"job {number}: {problem}", flush=True)
    expected = hashes_without_loss(*(x for x, _ in TRAININGS)) if TRAININGS else []
    for (grids, found), hashed in zip(TRAININGS, expected, strict=True):
        if found != hashed:
            failed += 1
            print(f"other results than on {grids} from the start", flush=True)
    print(f"{args.jobs} jobs, {failed} failed")
    for label in sorted(jobs):
        print(f"{label:24} {jobs[label]:5}, {bad[label]} of them in jobs that failed")
    for what, x in SECONDS.items():
        print(f"{what}: median {statistics.median(x):.3f}, {min(x):.3f} to {max(x):.3f}")
    return int(failed > 0)


if __name__ == "__main__":
    with TOP:
        code = main()
    sys.exit(code)
