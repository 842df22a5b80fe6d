"""Scripts parse, name only existing things, and clean up."""

import mmap
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import h5py
import pytest
from helpers import ROOT, SECONDS, execute, options_of
from mpi4py import MPI


def below(folder):
    """Return the shell scripts in a folder, by their paths in the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.sh"))


SCRIPTS = [".ci/run", *below("jobs")]
# The Python of this run first.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# A program and the rest of its command.
PROGRAM = re.compile(r"\b((?:drivers|data|jobs)/\w+\.(?:py|sh))([^\n;|&)]*)")
PASS_ON = {"jobs/local.sh": "drivers/attention.py", "jobs/gpu_local.sh": "drivers/attention.py",
           "jobs/train.sh": "drivers/train.py gpt",
           "jobs/simulate.sh": "drivers/plan.py simulate"}  # fmt: skip
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")


def commands(text):
    """Return (program, options) of every command in `text`, also in comments."""
    # What jobs/emulate.sh runs is a command of its own.
    text = re.sub(r" --(head)? ", "\n", text.replace("\\\n", " "))
    return [(program, OPTION.findall(rest)) for program, rest in PROGRAM.findall(text)]


@cache
def options(program):
    """Return the options that a program has."""
    program = PASS_ON.get(program, program)
    if program.endswith(".sh"):  # compare them in a test
        return set(re.findall(r"== (--[a-z-]+)", (ROOT / program).read_text()))
    return options_of(program)


@pytest.mark.parametrize("script", [*SCRIPTS, *below("tests/cluster")])
def test_syntax(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("source", SCRIPTS)
def test_programs_and_their_options_exist(source):
    for program, used in commands((ROOT / source).read_text()):
        assert (ROOT / program).is_file(), f"{source} runs {program}"
        if used:
            unknown = set(used) - options(program)
            assert not unknown, f"{source}: {program} knows no {', '.join(unknown)}"


def test_what_the_main_job_runs_is_found():
    ((program, used),) = [
        x for x in commands((ROOT / "jobs/local.sh").read_text()) if x[0] == "drivers/attention.py"
    ]
    assert {"--rows", "--backward", "--output"} <= set(used) <= options(program)


@pytest.mark.parametrize(
    "script, device", [("cpu", "cpu"), ("a100_16x4", "gpu"), ("h100_64x1", "gpu")]
)
def test_batch_jobs_say_on_what_they_compute(tmp_path, script, device):
    """Jobs print the device that they use; `srun` only prints its command here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho srun $*\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": "3", "SLURM_JOB_ID": "7", "venv": str(tmp_path),
           "PATH": f"{tmp_path / 'bin'}:{PATH}", "output": str(tmp_path),
           "input": "data/minilm_l3_1536.h5"}  # fmt: skip

    def run(code=0, **more):
        command = "bash", f"jobs/slurm_{script}.sh"
        return execute(*command, cwd=ROOT, env=job | more, timeout=60, code=code)

    for chosen in (device, "cpu"):
        done = run() if chosen == device else run(device=chosen)
        said, *commands = done.stdout.splitlines()
        assert said.startswith({"gpu": "each rank computes on a GPU",
                                "cpu": "each rank computes on 3 CPU cores"}[chosen])  # fmt: skip
        assert len(commands) == 2 and all(f" --device {chosen} " in x for x in commands)
    found = f"{ROOT / 'tests/emulated'}:{os.environ.get('PYTHONPATH', '')}"  # CuPy
    active = run(A2D_MPI_ENV="active", venv="/none", PYTHONPATH=found)
    assert active.stdout == run(A2D_MPI_ENV="").stdout
    done = run(device="tpu", code=2)
    assert done.stderr == "slurm.sh: device must be gpu or cpu, got tpu\n"


@pytest.mark.launches
def test_jobs_take_the_active_environment(tmp_path):
    """Jobs use the Python and MPI of this run, and install nothing."""
    copy, broken = tmp_path / "copy", tmp_path / "broken"
    for folder in (copy, broken):
        folder.mkdir()
        for name in ("data", "drivers", "jobs", "pyproject.toml", "setup.cfg", "src", "tests"):
            (folder / name).symlink_to(ROOT / name)
    for module in ("pip", "venv"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} was run')")
    (broken / "setup.cfg").unlink()
    setup = (ROOT / "setup.cfg").read_text().replace("h5py>=3.10", "no-such-package\n    h5py>=99")
    (broken / "setup.cfg").write_text(setup)

    def run(folder, *command, code=0, **more):
        active = {"A2D_MPI_ENV": "active", "PATH": PATH,
                  "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
        options = {"cwd": folder, "env": active | more, "timeout": 2 * SECONDS}
        return execute("bash", *command, **options, code=code)

    def refused(text, folder, *command, **more):
        done = run(folder, *command, code=2, **more)
        assert text in done.stderr and done.stderr.count("\n") == 1

    run(copy, "jobs/local.sh", "--seqlen", "64", "--trials", "1")
    with h5py.File(copy / "results/local.h5") as result:
        assert result.attrs["mpi_library"].startswith(MPI.Get_library_version().strip("\0")[:20])
    other = "mpich" if MPI.get_vendor()[0] == "Open MPI" else "openmpi"
    refused(f"this job needs {other}, but mpi4py has", copy, "jobs/test.sh", other)
    lacks = f"lacks no-such-package, h5py>=99 (has {h5py.__version__})"
    refused(lacks, broken, "jobs/local.sh")
    refused("found no srun -n; MPIEXEC must be", copy, "jobs/local.sh", MPIEXEC="srun -n")
    refused("must be active or unset, got on", copy, "jobs/local.sh", A2D_MPI_ENV="on")
    assert not [*copy.glob(".venv*"), *broken.glob(".venv*")]


SHM, TOPOLOGY = "/dev/shm/mpich_shm", "/tmp/hydra_hwloc_xmlfile"
# Makes an environment whose python and pip are itself; says when pip begins and ends.
SLOW_PYTHON = """#!/bin/bash
case "$*" in
  *"-m venv"*) rm -rf "${@: -1}"; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"
    echo "#!${@: -1}/bin/python" >"${@: -1}/bin/pip" ;;
  *"-m pip"*) echo begin >>pip.log; sleep 0.5; echo end >>pip.log ;;
esac
"""


def test_two_jobs_make_one_environment(tmp_path):
    """Jobs that start at once do not install into the same folder at once."""
    (tmp_path / "setup.cfg").touch()
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "slow_python"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    script = f"source {ROOT}/jobs/env.sh; use_env mpich && echo $VIRTUAL_ENV"
    env = {x: y for x, y in os.environ.items() if x != "A2D_MPI_ENV"} | {"PYTHON": str(python)}
    options = {"cwd": tmp_path, "env": env, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(["bash", "-c", script], **options) for _ in range(3)]
    assert [x.communicate(timeout=SECONDS)[0] for x in jobs] == [f"{tmp_path}/.venv\n"] * 3
    assert (tmp_path / "pip.log").read_text() == "begin\nend\n"


SWEEP = "set -euo pipefail; source jobs/env.sh; {}; echo done"


def test_what_killed_jobs_left_is_swept():
    """The next job of a user removes files of killed jobs, but none in use or of others."""
    if not Path("/proc/self/maps").exists():
        return  # nobody can tell what is in use
    old, kept = [
        [Path(f"{x}_{os.getpid()}{why}") for x in names]
        for names, why in (
            ((SHM, TOPOLOGY), "old"),
            ((f"{SHM}_open", f"{TOPOLOGY}_open", f"{SHM}_mapped", f"{SHM}_new", f"{TOPOLOGY}_new",
              "/dev/shm/other_shm", "/tmp/hydra"), ""),
        )
    ]  # fmt: skip
    mapped = None
    try:
        for path in (*old, *kept):
            path.write_bytes(bytes(mmap.PAGESIZE))
        with open(kept[0]), open(kept[1]):
            with open(kept[2], "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            # run_mpi sweeps before it looks for mpiexec, which is not there.
            for command in ("sweep_mpi", "MPIEXEC=/none; run_mpi 1 9 true || true"):
                for path in (*old, *(x for x in kept if "new" not in x.name)):
                    path.write_bytes(bytes(mmap.PAGESIZE))
                    os.utime(path, (time.time() - 90, time.time() - 90))
                done = execute("bash", "-c", SWEEP.format(command), cwd=ROOT, timeout=60)
                assert done.stdout == "done\n", done.stderr
                assert command != "sweep_mpi" or done.stderr == ""
                assert [x for x in (*old, *kept) if x.exists()] == kept
    finally:
        if mapped:
            mapped.close()
        for path in (*old, *kept):
            path.unlink(missing_ok=True)
