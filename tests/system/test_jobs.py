"""Scripts parse, name only existing things, and clean up."""

import mmap
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
from helpers import MPIEXEC, ROOT, SECONDS, execute, module_of, options_of, parser_of
from mpi4py import MPI


def below(folder):
    """Return the shell scripts in a folder, by their paths in the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.sh"))


SCRIPTS = [".ci/run", *below("jobs")]
# The Python of this run first.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# A program and the rest of its command.
PROGRAM = re.compile(r"\b((?:drivers|data|jobs)/\w+\.(?:py|sh))([^\n;|&)]*)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")


@pytest.mark.parametrize("script", [*SCRIPTS, *below("tests/cluster")])
def test_scripts(script):
    """A script can be read, and names programs and options that exist, also in comments."""
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    # What jobs/emulate.sh and jobs/slurm.sh run is a command of its own.
    text = (ROOT / script).read_text().replace("\\\n", " ")
    for program, rest in PROGRAM.findall(re.sub(r" --(head)? | jobs/slurm.sh ", "\n", text)):
        assert (ROOT / program).is_file(), f"{script} runs {program}"
        if program.startswith("drivers/"):
            unknown = set(OPTION.findall(rest)) - options_of(program)
            assert not unknown, f"{script}: {program} knows no {', '.join(unknown)}"


# Arguments of the jobs of jobs/run.py, and how many commands run then.
RUN = {
    "fuzz": {"60": 2, "openmpi 60 6 0": 2, "--case 7 4": 2, "mpich --case 7 4 mxfp4": 2},
    "net": {"HEAD": 5},
    "speed": {"HEAD local": 31, "HEAD 16x1": 17, "HEAD 64x1": 17, "HEAD 16x4": 17},
    "study": {
        "out": 19, "out 16x1": 6, "out 64x1": 6, "out 16x4": 6, "out ratio": 4, "out scaling": 5,
        "out crossover": 16, "out triangle": 14, "out nodes": 5,
        "out masks": 10, "out train": 5, "out decode": 5,
    },
    "scale": {
        "out": 21, "out 64": 4, "out 256": 4, "out 1024": 5, "out 4096": 5, "out gathers": 4,
        "out picks": 5, "out networks": 3, "out links": 5,
    },
    "simulate": {"--output out.h5 --ranks 64 --profile data/machines/a100-16x4.toml": 2},
    "wire": {"out errors": 11, "out seconds": 3},
    "train": {"": 5, "out --steps 100": 5},
    "figures": {"out": 14},
    "docs": {"": 2},
    "gpu": {"local --dtype float32": 3, "bench --trials 3": 8, "test -k real": 1},
}  # fmt: skip


@pytest.fixture
def run_py(monkeypatch):
    """Return the module jobs/run.py, which cannot run a command here."""
    monkeypatch.setattr(module_of("jobs/run.py"), "run", None)
    return module_of("jobs/run.py")


def test_help_lists_all_jobs(run_py, capsys):
    run_py.main(["--help"])
    listed = re.findall(r"^  ([a-z]+)\b", capsys.readouterr().out, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == list(run_py.JOBS) and run_py.JOBS.keys() == RUN.keys()


@pytest.mark.parametrize("job", RUN)
def test_printed_commands_exist(run_py, job, capsys):
    """With --dry-run nothing runs, and the drivers would take the printed arguments."""
    for words, count in RUN[job].items():
        run_py.main(["--dry-run", job, *words.split()])
        lines = f"\n{capsys.readouterr().out}".split("\n+ ")[1:]
        assert len(lines) == count, lines
        subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
        for line in lines:
            # What jobs/emulate.sh runs is a command of its own.
            given = shlex.split(line.rpartition(" -- ")[2])
            for i, program in enumerate(given):
                assert not PROGRAM.fullmatch(program) or (ROOT / program).is_file()
                if program.startswith("drivers/"):
                    parser_of(program).parse_args(given[i + 1 :])


BAD = """no_such_job; fuzz; fuzz 0; fuzz 60 9; fuzz 60 4 x; fuzz --case 7; net; net a b;
speed HEAD; speed HEAD 2x2; study; study out 2x2; scale; scale out 65; wire out; wire out bits;
figures; docs all; gpu; gpu all"""


@pytest.mark.parametrize("words", BAD.replace("\n", " ").split("; "))
def test_bad_arguments(run_py, words, capsys):
    with pytest.raises(SystemExit) as end:
        run_py.main(words.split())
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.startswith("run.py: ") and said.err.count("\n") == 1


@pytest.fixture
def run_with(tmp_path):
    """Return a command and an environment to run jobs/run.py with another mpiexec."""

    def prepare(mpiexec):
        (tmp_path / "mpiexec").write_text(f"#!/bin/bash\n{mpiexec}\n")
        (tmp_path / "mpiexec").chmod(0o755)
        env = {"A2D_MPI_ENV": "active", "PATH": PATH, "MPIEXEC": str(tmp_path / "mpiexec")}
        return [sys.executable, ROOT / "jobs/run.py", "fuzz", "60"], env

    return prepare


def test_a_failed_command_ends_the_job(run_with):
    command, env = run_with("exit 7")
    done = execute(*command, env=env, timeout=60, code=7)
    programs = [x.split()[1] for x in done.stdout.splitlines()]
    assert programs == ["use_env", "run_mpi"], done.stdout + done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_and_its_commands(run_with, tmp_path, sent):
    pid = tmp_path / "pid"
    command, env = run_with(f"echo $$ >{pid}.new && mv {pid}.new {pid} && exec sleep 60")
    with subprocess.Popen(command, env=os.environ | env, stdout=subprocess.DEVNULL) as job:
        begin = time.monotonic()
        while not pid.exists() and time.monotonic() < begin + SECONDS:
            time.sleep(0.05)
        job.send_signal(sent)
        assert job.wait(SECONDS) == 128 + sent
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.fixture
def submit(tmp_path):
    """Return a function that runs the batch script; launchers only print their commands here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    for name in ("srun", "mpiexec"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"A2D_MPI_ENV": "", "SLURM_CPUS_PER_TASK": "3", "SLURM_JOB_ID": "7",
           "venv": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{PATH}", "output": str(tmp_path),
           "input": "data/minilm_l3_1536.h5"}  # fmt: skip

    def run(*command, code=0, **more):
        command = "bash", "jobs/slurm.sh", *command
        return execute(*command, cwd=ROOT, env=job | more, timeout=60, code=code)

    return run


@pytest.mark.parametrize("asked, device", [({}, "cpu"), ({"SLURM_GPUS_ON_NODE": "4"}, "gpu")])
def test_batch_job_says_on_what_it_computes(submit, asked, device):
    """The main job computes on GPUs if the job has some, unless device=cpu."""
    for chosen in (device, "cpu"):
        done = submit(**asked) if chosen == device else submit(**asked, device=chosen)
        said, *commands = done.stdout.splitlines()
        assert said.startswith({"gpu": "each rank computes on a GPU",
                                "cpu": "each rank computes on 3 CPU cores"}[chosen])  # fmt: skip
        assert len(commands) == 2 and all(f" --device {chosen} " in x for x in commands)
    found = f"{ROOT / 'tests/gpu/emulated'}:{os.environ.get('PYTHONPATH', '')}"  # CuPy
    active = submit(**asked, A2D_MPI_ENV="active", venv="/none", PYTHONPATH=found)
    assert active.stdout == submit(**asked).stdout
    done = submit(device="tpu", code=2)
    assert done.stderr == "slurm.sh: device must be gpu or cpu, got tpu\n"


def test_batch_job_runs_a_command(submit):
    command = "python", "drivers/train.py", "--survive"
    assert submit(*command).stdout == f"srun --mpi=pmix --kill-on-bad-exit=1 {' '.join(command)}\n"
    sizes = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2"}
    launcher = "mpiexec --with-ft ulfm -n 8 --map-by ppr:2:node"
    assert submit(*command, survive="1", **sizes).stdout == f"{launcher} {' '.join(command)}\n"


@pytest.mark.launches
def test_jobs_take_the_active_environment(tmp_path):
    """Jobs use the Python and MPI of this run, and install nothing."""
    copy, broken = tmp_path / "copy", tmp_path / "broken"
    mpich = MPI.get_vendor()[0] != "Open MPI"
    other = "openmpi" if mpich else "mpich"
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

    given = " ".join([*MPIEXEC, "-prepend-rank" if mpich else "--tag-output"])
    done = run(copy, "jobs/local.sh", "--seqlen", "64", "--trials", "1", MPIEXEC=given)
    assert re.search(r"^\[.*0.*\].* checked ", done.stdout, re.MULTILINE), done.stdout
    with h5py.File(copy / "results/local.h5") as result:
        library = result["origin"].attrs["mpi_library"]
        assert library.startswith(MPI.Get_library_version().strip("\0")[:20])
    refused(f"this job needs {other}, but mpi4py has", copy, "jobs/test.sh", other)
    lacks = f"lacks no-such-package, h5py>=99 (has {h5py.__version__})"
    refused(lacks, broken, "jobs/local.sh")
    refused("found no no-srun; MPIEXEC must be", copy, "jobs/local.sh", MPIEXEC="no-srun -n")
    refused("must be active or unset, got on", copy, "jobs/local.sh", A2D_MPI_ENV="on")
    assert not [*copy.glob(".venv*"), *broken.glob(".venv*")]


def test_marks_are_the_jobs_own():
    for option in ("-m", "-mcausal"):
        done = execute("bash", "jobs/test.sh", "openmpi", option, cwd=ROOT, timeout=60, code=2)
        assert done.stdout == "" and done.stderr.startswith(f"test.sh: {option} would replace")


HANGS = """
import time
import pytest

@pytest.mark.parametrize("i", range(3))
def test_good(i):
    pass

def test_bad():
    raise ValueError

def test_hangs():
    time.sleep(1000)
"""


@pytest.mark.thorough
def test_a_run_out_of_time_keeps_its_counts(tmp_path):
    """It names the tests that failed, and those that did not end."""
    for name in ("jobs", "tests"):
        (tmp_path / name).mkdir()
    for name in ("setup.cfg", "pyproject.toml", "src", "jobs/env.sh", "jobs/gpu.sh",
                 "jobs/active.py", "tests/conftest.py"):  # fmt: skip
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "jobs/test.sh").read_text()
    short = text.replace("most=900", "most=15").replace("rank_counts=(1 4 6)", "rank_counts=()")
    (tmp_path / "jobs/test.sh").write_text(short)
    for name in ("a", "b"):
        (tmp_path / f"tests/test_{name}.py").write_text(HANGS)
    env = {"A2D_MPI_ENV": "active", "PATH": PATH}
    done = execute("bash", "jobs/test.sh", "mpich", cwd=tmp_path, env=env, timeout=100, code=1)
    for name in ("a", "b"):
        assert f"\nfailed: tests/test_{name}.py::test_bad\n" in done.stdout
        assert f"\nnot ended: tests/test_{name}.py::test_hangs\n" in done.stdout
    assert "mpich, serial: 6 passed, 2 failed, " in done.stdout and ", out of time" in done.stdout
    assert done.stdout.endswith("\n6 passed, 2 failed\n")


SHM, TOPOLOGY = "/dev/shm/mpich_shm", "/tmp/hydra_hwloc_xmlfile"
# Makes an environment whose python and pip are itself; says when pip begins and ends.
SLOW_PYTHON = """#!/bin/bash
case "$*" in
  *"-m venv"*) rm -rf "${@: -1}"; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"
    echo "#!${@: -1}/bin/python" >"${@: -1}/bin/pip" ;;
  *"-m pip"*) echo "begin ${@: -1}" >>pip.log; sleep 0.5; echo end >>pip.log ;;
esac
"""
# Functions of bash that hide uv, or stand in for it.
UV = {
    False: 'command() { [[ $2 != uv ]] && builtin command "$@"; }',
    True: 'uv() { touch uv.log; [[ $1 == pip ]] || set -- venv "${@: -1}"; "$PYTHON" -m "$@"; }',
}


@pytest.fixture(params=UV, ids=["pip", "uv"])
def start(request, tmp_path):
    """Return a function that starts a line of bash with env.sh, with or without uv."""
    (tmp_path / "setup.cfg").touch()
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "slow_python"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    env = {x: y for x, y in os.environ.items() if x != "A2D_MPI_ENV"} | {"PYTHON": str(python)}
    options = {"cwd": tmp_path, "env": env, "stdout": subprocess.PIPE, "text": True}

    def run(line):
        script = f"source {ROOT}/jobs/env.sh; {UV[request.param]}; {line}"
        return subprocess.Popen(["bash", "-c", script], **options)

    yield run
    assert (tmp_path / "uv.log").exists() == request.param


def test_two_jobs_make_one_environment(start, tmp_path):
    """Jobs that start at once do not install into the same folder at once."""
    jobs = [start("use_env mpich && echo $VIRTUAL_ENV") for _ in range(3)]
    assert [x.communicate(timeout=SECONDS)[0] for x in jobs] == [f"{tmp_path}/.venv\n"] * 3
    assert (tmp_path / "pip.log").read_text() == "begin .[mpich]\nend\n"


def test_an_environment_gets_the_extras_that_jobs_need(start, tmp_path):
    """The first run has only MPI.  Later jobs add extras, and a new setup.cfg starts anew."""

    def installed(line):
        (tmp_path / "pip.log").write_text("")
        start(line).communicate(timeout=SECONDS)
        return re.findall("begin (.*)", (tmp_path / "pip.log").read_text())

    assert installed("use_env any") == [".[mpich]"]
    assert installed('use_env any "" numba') == [".[mpich,numba]"]
    assert installed("use_env mpich numba && use_env mpich") == []
    (tmp_path / ".venv" / "own").touch()
    assert installed("use_env any test,lint") == [".[lint,mpich,numba,test]"]
    assert (tmp_path / ".venv" / "own").exists()
    assert installed("use_env any pytest test .venv-other") == [".[mpich,test]"]
    (tmp_path / "setup.cfg").write_text("changed")
    assert installed("use_env any test") == [".[mpich,test]"]
    assert not (tmp_path / ".venv" / "own").exists()


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
