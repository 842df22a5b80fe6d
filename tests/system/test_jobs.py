"""Jobs run commands that exist, in the environment that they are told.

tests/cluster/slurm.sh runs the batch script jobs/slurm.sh.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from helpers import MPIEXEC, ROOT, execute, module_of, parser_of
from mpi4py import MPI

# The Python of this run first.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# A program and the rest of its command.
PROGRAM = re.compile(r"\b((?:drivers|data|jobs)/\w+\.(?:py|sh))([^\n;|&)]*)")
# Arguments of the jobs of jobs/run.py.
RUN = {
    "random": ["", "6 7"],
    "net": ["HEAD"],
    "speed": ["HEAD local", "HEAD 16x1", "HEAD 64x1", "HEAD 16x4"],
    "study": ["out", "out crossover", "out triangle", "out nodes", "out masks", "out train",
              "out decode"],
    "scale": ["out"],
    "wire": ["out errors", "out seconds"],
    "train": ["", "out --steps 100"],
    "figures": ["out"],
    "docs": [""],
    "gpu": ["local --dtype float32", "bench --trials 3", "test -k real"],
}  # fmt: skip


@pytest.mark.parametrize("job", RUN)
def test_printed_commands_exist(monkeypatch, job, capsys):
    """With --dry-run nothing runs, and the drivers would take the printed arguments."""
    run_py = module_of("jobs/run.py")
    monkeypatch.setattr(run_py, "run", None)
    assert run_py.JOBS.keys() == RUN.keys()
    for words in RUN[job]:
        run_py.main(["--dry-run", job, *words.split()])
        lines = f"\n{capsys.readouterr().out}".split("\n+ ")[1:]
        subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
        for line in lines:
            # What jobs/emulate.sh runs is a command of its own.
            given = shlex.split(line.rpartition(" -- ")[2])
            for i, program in enumerate(given):
                assert not PROGRAM.fullmatch(program) or (ROOT / program).is_file()
                if program.startswith("drivers/"):
                    parser_of(program).parse_args(given[i + 1 :])


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
        options = {"cwd": folder, "env": active | more}
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
