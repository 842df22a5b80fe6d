"""Kill drivers at random moments, resume, and compare with uninterrupted runs.

    nice python tests/tools/kills.py --kills 300 --seed 0

Every driver that writes files runs on two ranks with a tiny problem.  It is killed, and started
again with the same options until it ends.  A kill is a SIGKILL of the whole job ("all"), a SIGKILL
of one rank ("rank"), or a SIGTERM of the launcher ("term").  Work that was finished before a kill
must exist after it, and the final results must equal an uninterrupted run bit for bit.  The script
prints a table by driver and kind of kill.  The exit code is 1 if anything was lost or differs.
tests/system/test_killed.py has a few kills of this kind.  A kill takes about seven seconds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
from helpers import ROOT, SAMPLE
from test_killed import kill, ranks_below, start

from a2d_mpi.experiments.checkpoint import latest
from a2d_mpi.experiments.results import read_benchmark, read_result

TRAINED = Path(tempfile.gettempdir(), f"a2d_mpi-kills-{os.getpid()}")
KINDS = ("all", "rank", "term")
MODEL = ("--layers", "1", "--width", "8", "--nheads", "2")
TEXT = (ROOT / "LICENSE", "--separator", "", *MODEL, "--seqlen", "40", "--warmup-steps", "5")


@dataclass
class Case:
    """A driver.

    Attributes
    ----------
    share : int
        Of all kills.
    options : callable
        Of a folder that is its own.
    done : callable
        The set of what it has finished in the folder; nothing may ever leave it.
    bits : callable
        What it comes to in the end, of the folder and its standard output.
    """

    share: int
    options: Callable[[Path], list]
    done: Callable[[Path], set]
    bits: Callable[[Path, str], object]


def training(folder: Path) -> set:
    if not (folder / "checkpoints").exists():
        return set()
    state, refused = latest(folder / "checkpoints")
    assert not refused, refused
    return set(range(state.step)) if state else set()


def trained(folder: Path, _: str) -> object:
    state, refused = latest(folder / "checkpoints")
    with h5py.File(folder / "log.h5") as file:
        losses = file["loss"][()].tobytes()
    left = sorted(os.listdir(folder)), sorted(os.listdir(folder / "checkpoints")), refused
    return left, state.step, state.weights.tobytes(), state.moments.tobytes(), losses


def benched(folder: Path) -> set:
    path = folder / "bench.h5"
    if not path.exists():
        return set()
    return {(name, x.provenance["utc_time"]) for name, x in read_benchmark(path).items()}


def bench_bits(folder: Path, _: str) -> object:
    found = {
        name: (
            {check: (y.error, y.bound) for check, y in x.checks.items()},
            {k: {a: b.tobytes() for a, b in both.items()} for k, both in x.traffic.items()},
        )
        for name, x in read_benchmark(folder / "bench.h5").items()
    }
    return sorted(os.listdir(folder)), found


def names(folder: Path) -> set:
    if not (folder / "runs.h5").exists():
        return set()
    with h5py.File(folder / "runs.h5") as file:
        return {(name, x.attrs["utc_time"]) for name, x in file["runs"].items()}


def steps_bits(folder: Path, _: str) -> object:
    with h5py.File(folder / "runs.h5") as file:
        return sorted(os.listdir(folder)), {
            name: (x["sent"][()].tobytes(), x.attrs["loss error"], x.attrs["gradient error"])
            for name, x in file["runs"].items()
        }


def outputs(folder: Path) -> set:
    if not (folder / "out.h5").exists():
        return set()
    found = read_result(folder / "out.h5").outputs
    return {(name, hashlib.sha256(x.tobytes()).hexdigest()) for name, x in found.items()}


def decoded(folder: Path) -> set:
    if not (folder / "decode.h5").exists():
        return set()
    with h5py.File(folder / "decode.h5") as file:
        return {
            (ranks, context, x["checks/out"].attrs["error"], int(x.attrs["sent_bytes"]))
            for ranks, group in file["runs"].items()
            for context, x in group.items()
        }


def generated(_: Path) -> set:
    return {(x.name, hashlib.sha256(x.read_bytes()).hexdigest()) for x in checkpoints().iterdir()}


def checkpoints() -> Path:
    """Train a model for `generate.py`, once."""
    if not TRAINED.exists():
        job = start(2, *TEXT, "--steps", 4, "--folder", TRAINED, program="train.py gpt")
        job.communicate(timeout=100)
    return TRAINED


def listed(done: Callable[[Path], set]) -> Callable[[Path, str], object]:
    return lambda folder, _: (sorted(os.listdir(folder)), done(folder))


CASES = {
    "train.py gpt": Case(
        40,
        lambda x: [*TEXT, "--steps", 150, "--every", 1, "--kernel", "numpy", "--resume",
                   "--folder", x / "checkpoints", "--output", x / "log.h5"],
        training, trained,
    ),
    "bench.py": Case(
        22,
        lambda x: ["--output", x / "bench.h5", "--nheads", 4, "--headdim", 8, "--trials", 2,
                   "--seqlens", "64,65,66,67", "--plans", "all",
                   "--resume", "--kernel", "numpy"],
        benched, bench_bits,
    ),
    "bench.py train": Case(
        12,
        lambda x: ["--output", x / "runs.h5", *MODEL, "--vocab", 16, "--seqlen", 64,
                   "--trials", 3, "--plans", "ring,attention2d:1x2,attention2d:2x1", "--resume"],
        names, steps_bits,
    ),
    "attention.py": Case(
        10,
        lambda x: [SAMPLE, "--seqlen", 256, "--trials", 3, "--backward",
                   "--kernel", "numpy", "--output", x / "out.h5", "--save-outputs"],
        outputs, listed(outputs),
    ),
    "bench.py decode": Case(
        8,
        lambda x: ["--output", x / "decode.h5", "--width", 32, "--nheads", 4, "--contexts",
                   "64,128", "--trials", 3],
        decoded, listed(decoded),
    ),
    "generate.py": Case(
        8,
        lambda x: [checkpoints(), "--prompt", "So ", "--tokens", 30, "--temperature", 0.7],
        generated, lambda _, stdout: stdout.splitlines()[0],
    ),
}  # fmt: skip


def run(program: str, folder: Path, moment: float | None, kind: str, draw: random.Random):
    """Run a driver, killed after some seconds; return whether it was killed, and its stdout."""
    folder.mkdir(exist_ok=True)
    job = start(2, *CASES[program].options(folder), program=program)
    began = time.monotonic()
    try:
        if moment is None:
            stdout, stderr = job.communicate(timeout=200)
            if job.returncode:
                raise RuntimeError(f"{program} ended with {job.returncode}: {stderr[-2000:]}")
            return False, stdout
        with suppress(subprocess.TimeoutExpired):
            job.wait(moment)
        everyone, ranks = ranks_below(job.pid)
        if job.poll() is None:
            if kind == "all" or (kind == "rank" and not ranks):
                kill(everyone)
            elif kind == "rank":
                kill([ranks[draw.choice(sorted(ranks))]])
            else:
                job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=60)
    finally:
        kill(ranks_below(job.pid)[0] if job.poll() is None else [])
    if job.returncode == 0:
        return False, stdout
    if job.returncode in (1, 2) and "error:" in stderr:
        raise RuntimeError(f"{program} after {time.monotonic() - began:.1f} s: {stderr[-2000:]}")
    return True, stdout


def main(argv=None) -> int:
    """Kill drivers and print the table; return the exit code."""
    parser = argparse.ArgumentParser("kills.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="drivers")
    args = parser.parse_args(argv)
    cases = {x: CASES[x] for x in args.only}
    draw, whole = random.Random(args.seed), sum(x.share for x in cases.values())
    table = {x: Counter() for program in cases for x in ((program, kind) for kind in KINDS)}
    bad = False
    with tempfile.TemporaryDirectory() as top:
        for program, case in cases.items():
            folder, began = Path(top, program), time.monotonic()
            expected = case.bits(folder, run(program, Path(top, program), None, "", draw)[1])
            seconds, left = time.monotonic() - began, -(-args.kills * case.share // whole)
            shutil.rmtree(folder)
            killed, before = [], set()
            while left or killed:
                kind = KINDS[left % 3]
                # Half of the moments are late: the first seconds are the start of Python.
                moment = draw.uniform(draw.choice([0.1, 0.5]) * seconds, seconds) if left else None
                was, stdout = run(program, folder, moment, kind, draw)
                after = case.done(folder)
                lost = not before <= after
                bad |= lost
                for x in killed[-1:]:
                    table[program, x]["resumed"] += 1
                if was:
                    left -= 1
                    killed.append(kind)
                    table[program, kind].update(kills=1, lost=int(lost))
                    before = after
                else:  # to its end
                    equal = case.bits(folder, stdout) == expected
                    bad |= not equal
                    for x in killed:
                        table[program, x]["equal"] += equal
                    shutil.rmtree(folder)
                    killed, before = [], set()
            for kind in KINDS:
                print(f"{program:<16} {kind:<5}", ", ".join(
                    f"{table[program, kind][x]} {x}" for x in ("kills", "resumed", "equal", "lost")
                ), flush=True)  # fmt: skip
    shutil.rmtree(TRAINED, ignore_errors=True)
    total = sum(table.values(), Counter())
    print("in all:", ", ".join(f"{total[x]} {x}" for x in ("kills", "resumed", "equal", "lost")))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
