"""Whoever is killed and when: nothing that drivers/bench.py has finished is lost, and a training
run goes on to the same bits."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import DRIVERS, ENVIRONMENT, MPIEXEC, ROOT, drive, named
from test_bench import SMALL, bench

from a2d_mpi.experiments.checkpoint import latest
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA, read_benchmark
from a2d_mpi.experiments.sweep import Case, plans_for

launches = pytest.mark.launches

NUMPY = ["--kernel", "numpy"]  # as `drive` has it: what is killed goes on with the same bits
SWEEP = ["--seqlens", "256,257,258,259", "--masks", "causal,full", "--plans", "all", "--backward"]


def start(ranks, *options, program="bench.py"):
    driver, *command = program.split()
    words = MPIEXEC, "-n", ranks, sys.executable, DRIVERS / driver, *command, *options
    return subprocess.Popen(
        [str(x) for x in words],
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_below(pid):
    """Return the PIDs of all processes that came from `pid`, with their ranks."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:  # grows meanwhile
        found += [child for child, its in parents.items() if its == parent]
    ranks = {}
    for child in found[1:]:
        try:
            command = Path(f"/proc/{child}/cmdline").read_text()
            environment = Path(f"/proc/{child}/environ").read_text()
        except OSError:
            continue
        rank = re.search(r"(?:^|\0)(?:PMI|OMPI_COMM_WORLD)_RANK=(\d+)", environment)
        if rank and str(DRIVERS) in command and not command.startswith("/bin/sh"):
            ranks[int(rank[1])] = child
    return found, ranks


def kill(pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_killed_at_any_moment(tmp_path):
    """After kills of the launcher and of ranks, printed results exist and runs continue."""
    output = tmp_path / "bench.h5"
    options = ["--output", output, *SMALL, *SWEEP, *NUMPY, "--resume"]
    moments = random.Random(0)
    known = {}
    for _ in range(3):
        job = start(2, *options)
        try:
            # Most of the first second is the start of Python.
            time.sleep(moments.uniform(1, 3))
        finally:
            kill(ranks_below(job.pid)[0])
            stdout, _ = job.communicate(timeout=30)
        if output.exists():
            found = read_benchmark(output)
            assert set(known) <= set(found)
            for name, time_of_it in known.items():
                assert found[name].provenance["utc_time"] == time_of_it
            assert all(result.passed for result in found.values())
            printed = re.findall(r"^(\S+), 2 ranks$", stdout, re.MULTILINE)
            assert set(printed) <= {result.config["workload"] for result in found.values()}
            known = {name: result.provenance["utc_time"] for name, result in found.items()}
    bench(2, *options)
    found = read_benchmark(output)
    names = {
        c.name
        for n in range(256, 260)
        for mask in ("causal", "full")
        for c in plans_for(Case(n, 4, 8, mask=mask, backward=True), ["all"], 2)
        if c.method in {result.config["method"] for result in found.values()}
    }
    assert set(found) == names
    assert os.listdir(tmp_path) == ["bench.h5"]


# How a job ends of which a rank was killed is for MPI to say, the file is for the kernel.
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("while filling", marks=pytest.mark.thorough),
        pytest.param("before the replacement", marks=pytest.mark.thorough),
        pytest.param("after it", marks=launches),
    ],
)
def test_killed_while_writing(tmp_path, moment):
    output = tmp_path / "bench.h5"
    options = ["--output", output, *SMALL, "--seqlens", "64,65", "--plans", "ring,attention2d:1x2"]
    # The file is made empty first, then there are two workloads of two plans each.
    sabotage = {
        "while filling": "import a2d_mpi.experiments.hdf5 as b\nold, calls = b._new_group, []\n"
        "def new_group(parent, name):\n    calls.extend([0] * (name == 'timings'))\n"
        "    if len(calls) == 3: os.kill(os.getpid(), 9)\n    return old(parent, name)\n"
        "b._new_group = new_group",
        "before the replacement": "old, calls = os.replace, []\n"
        "def replace(*x):\n    calls.append(0)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), 9)\n    old(*x)\nos.replace = replace",
        "after it": "old, calls = os.replace, []\n"
        "def replace(*x):\n    old(*x)\n    calls.append(0)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), 9)\nos.replace = replace",
    }[moment]
    done = bench(2, *options, sabotage=sabotage, code=None)
    assert done.returncode not in (0, 1, 2)
    assert len(read_benchmark(output)) == (4 if moment == "after it" else 2)
    bench(2, *options, "--resume")
    assert len(read_benchmark(output)) == 4
    assert os.listdir(tmp_path) == ["bench.h5"]


TRAINING = [
    *(ROOT / "LICENSE", "--separator", "", "--layers", "1", "--width", "8"),
    *("--nheads", "2", "--seqlen", "40", "--warmup-steps", "5", *NUMPY),
]


def ended(folder):
    """Return the state of a finished training; assert that nothing else is left."""
    assert sorted(os.listdir(folder)) == ["checkpoints", "log.h5"]
    state, refused = latest(folder / "checkpoints")
    assert not refused and len(os.listdir(folder / "checkpoints")) == 2
    losses = read_file(folder / "log.h5", TRAINING_SCHEMA)["loss"]
    assert losses.tolist() == state.losses.tolist()
    return state.step, state.weights.tobytes(), state.moments.tobytes(), losses.tobytes()


def files(folder):
    folder.mkdir(exist_ok=True)
    return ["--folder", folder / "checkpoints", "--output", folder / "log.h5"]


@pytest.mark.thorough
def test_training_killed_at_any_moment(tmp_path):
    """The launcher and all ranks, again and again, before and after any step."""
    options = [*TRAINING, "--steps", "150", "--every", "3"]
    drive("train.py gpt", 2, *options, *files(tmp_path / "whole"))
    folder, moments, seen = tmp_path / "killed", random.Random(0), []
    for _ in range(2):
        job = start(2, *options, *files(folder), "--resume", program="train.py gpt")
        try:
            deadline = time.monotonic() + 60
            before = step_of(folder)
            while step_of(folder) == before:
                assert time.monotonic() < deadline and job.poll() is None
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.2))
        finally:
            kill(ranks_below(job.pid)[0])
            job.communicate(timeout=30)
        seen.append(step_of(folder))
        assert not (folder / "log.h5").exists()
    assert seen == sorted(set(seen)) and seen[-1] < 150
    drive("train.py gpt", 2, *options, *files(folder), "--resume")
    assert ended(folder) == ended(tmp_path / "whole")


def step_of(folder):
    """Return the step of the latest checkpoint."""
    return max((int(x.stem[5:]) for x in folder.glob("checkpoints/step-*.h5")), default=0)


KILL = """
old, calls = {0}, []
def counted(*x, **options):
    calls.append(0)
    if len(calls) == {1}: os.kill(os.getpid(), 9)
    old(*x, **options)
{0} = counted
"""


def test_training_killed_while_writing(tmp_path):
    """Checkpoints after steps 2, 4, 6, 8 and 9, then losses; it goes on with others."""
    options, expected = [*TRAINING, "--steps", "9"], None
    for name, sabotage, step in (
        ("whole", "", 9),
        ("filling", "import h5py\n" + KILL.format("h5py.Group.create_dataset", 11), 4),
        ("after it", KILL.format("os.unlink", 4), 6),
        ("losses", KILL.format("os.replace", 6), 9),
    ):
        case = *options, *files(tmp_path / name)
        code = None if sabotage else 0
        done = drive("train.py gpt", 1, *case, "--every", "2", sabotage=sabotage, code=code)
        with named(name):
            assert step_of(tmp_path / name) == step
            if sabotage:
                assert done.returncode not in (0, 1, 2), done.stderr
                done = drive("train.py gpt", 1, *case, "--every", "5", "--resume")
            assert done.returncode == 0, done.stderr
            found = ended(tmp_path / name)
            assert found == (expected := expected or found)
