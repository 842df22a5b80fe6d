"""Kill ranks at random moments, and check that the others continue, with ULFM.

    nice python tests/tools/losses.py --jobs 100 --seed 0

Each job has 6 ranks and up to three stages (tests/tools/lost.py).  In each stage 1 to 3 ranks kill
themselves in a random phase.  The survivors raise `RanksLost`, shrink their grid and compute
results with a new plan.  A job passes if all survivors hear of each loss within 10 s, and all
results equal those of new grids of the same shape, bit for bit.  The script prints a table by
phase.  The exit code is 1 if any job failed.  A job takes about three seconds on two idle cores.

In phase "grid" ranks die while a grid is made.  Open MPI 5.0.11 itself crashes in some of these
jobs: a rank that hears of a death while it makes a communicator reads an incomplete one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from helpers import launch
from test_ulfm import LOST, hashes, lose

PHASES = ("forward", "backward", "making", "rows", "grid", "shrink")
PROBLEMS = (
    ("attention2d", 1),
    ("attention2d", 2),
    ("ring", 1),
    ("double ring", 1),
    ("triangle", 1),
)


def stages_of(choice: random.Random, method: str, phases: Sequence[str]) -> list:
    """Return stages for 6 ranks, of which at least one survives."""
    ranks, stages = 6, []
    while ranks > 1 and len(stages) < 3:
        if method == "triangle" and ranks < 6:
            break
        phase = choice.choice(phases)
        victims = choice.sample(range(ranks), min(ranks - 1, choice.randint(1, 3)))
        stages.append((phase, victims, choice.uniform(0, 0.1)))
        ranks -= len(victims)
    return stages


def failure(done: subprocess.CompletedProcess, expected: dict, stages: list) -> str:
    """Describe what is wrong with a job; return "" if nothing is."""
    told = [float(x) for x in re.findall(r"^\w+ lost .* after (\S+)$", done.stdout, re.MULTILINE)]
    found = re.findall(r"^hash (\S+) (\w+)", done.stdout, re.MULTILINE)
    if done.returncode:
        return f"exit code {done.returncode}"
    if max(told, default=99) > 10:
        return f"told after {told} s"
    if len(found) != len(stages):
        return f"{len(found)} of {len(stages)} stages"
    return "".join(f"other results on {x}; " for x, text in found if expected[x] != text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    args = parser.parse_args()
    jobs, bad, slowest, expected = Counter(), Counter(), 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        for method, heads in {(method, heads) for method, heads in PROBLEMS}:
            done = launch(5, LOST, folder, method, heads, timeout=100)
            expected.setdefault(method, {}).update(hashes(done.stdout))
        for job in range(args.jobs):
            choice = random.Random(f"{args.seed} {job}")
            method, heads = choice.choice(PROBLEMS)
            stages = stages_of(choice, method, args.phases)
            try:
                mine = Path(folder, str(job))
                mine.mkdir()
                done = lose(mine, stages, method, heads, timeout=40)
                problem = failure(done, expected[method], stages)
                seconds = re.findall(r" (?:after|shrunk) (\S+)$", done.stdout, re.MULTILINE)
                slowest = max(slowest, *map(float, seconds), 0)
            except subprocess.TimeoutExpired as error:
                problem, done = "a hang", error
            for phase, *_ in stages:
                jobs[phase] += 1
                bad[phase] += bool(problem)
            if problem:
                print(f"job {job}: {method}, {heads} heads, {stages}: {problem}")
                print(*(x if isinstance(x, str) else (x or b"").decode()
                        for x in (done.stdout, done.stderr)), flush=True)  # fmt: skip
    for phase in PHASES:
        print(f"{phase:10s} {jobs[phase]:5d} losses, {bad[phase]} of them in jobs that failed")
    print(f"slowest notice or repair: {slowest:.2f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
