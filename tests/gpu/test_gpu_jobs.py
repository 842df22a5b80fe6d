"""Jobs for GPUs, with commands that stand in for those of a machine that has one."""

import os
import re
import sys
import zipfile
from pathlib import Path

import h5py
import pytest
from helpers import ROOT, execute

EMULATED = ROOT / "tests/gpu/emulated"
NEEDED = ("data", "drivers", "jobs", "pyproject.toml", "setup.cfg", "src", "tests")


@pytest.fixture
def machine(tmp_path):
    """A copy of the repository, a folder of commands, and what runs a job there.

    Nothing can be installed from an index.
    """
    copy, commands = tmp_path / "copy", tmp_path / "bin"
    copy.mkdir(), commands.mkdir()
    for name in NEEDED:
        (copy / name).symlink_to(ROOT / name)

    def command(name, text):
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)

    def run(*job, code=0, **more):
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"A2D_MPI_ENV": "active", "PATH": path, "PIP_INDEX_URL": "http://127.0.0.1:9"}
        program = "python" if job[0] == "jobs/run.py" else "bash"
        return execute(program, *job, cwd=copy, env=env | more, timeout=100, code=code)

    command("nvidia-smi", "echo 'CUDA Version: 13.0'")
    run.command, run.copy, run.folder = command, copy, tmp_path
    return run


def wheel(folder, name, files):
    """A wheel of these files, by their paths in it."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, data in files.items():
            file.writestr(path, data)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.thorough
def test_jobs_take_a_folder_of_wheels(machine):
    """Jobs use the active Python and MPI, and CuPy from the folder."""
    wheels = machine.folder / "wheels"
    wheels.mkdir()
    files = {str(x.relative_to(EMULATED)): x.read_bytes() for x in EMULATED.rglob("cupy/*.py")}
    wheel(wheels, "cupy", files | {"cuda.h": (EMULATED / "cuda.h").read_bytes()})
    options = ["--seqlen", "50", "--trials", "1", "--dtype", "float32", "--transfers", "host"]
    local = "jobs/run.py", "gpu", "local", *options
    assert "lacks cupy" in machine(*local, code=2).stderr
    machine(*local, A2D_MPI_WHEELS=str(wheels))
    with h5py.File(machine.copy / "results/gpu_local.h5") as file:
        assert file["origin"].attrs["device"] == "emulated GPU"
    assert (machine.copy / ".venv-active").is_dir()
    # CuPy and cuDNN's frontend look for the wheels of CUDA in their own environment.
    outer = machine.folder / "outer"
    (outer / "nvidia").mkdir(parents=True)
    site = next((machine.copy / ".venv-active").glob("lib/python*/site-packages"))
    # First, and in place of those that this environment may have: torch brings some.
    (site / "active.pth").write_text(f"{outer}\n{(site / 'active.pth').read_text()}")
    (site / "nvidia").unlink(missing_ok=True)
    for _ in range(2):
        machine("-c", "source jobs/env.sh; _link_libraries .venv-active")
    assert (site / "nvidia").resolve() == outer / "nvidia"


def test_ucx_of_a_wheel_takes_the_place_of_open_mpis(machine):
    openmpi, site = machine.folder / "openmpi", machine.folder / "site"
    for path in (
        "openmpi/ucx/libuct_ib.so.0",
        "openmpi/libucp.so.0",
        "site/libucx_cu13.libs/libx",
    ):
        (machine.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (machine.folder / path).write_text("old")
    (site / "libucx/lib/ucx").mkdir(parents=True)
    libraries = [f"lib{x}.so.0" for x in ("ucm", "ucp", "ucs", "uct", "ucs_signal")]
    modules = [f"lib{x}.so.0" for x in ("ucm_cuda", "uct_cma", "uct_cuda")]
    for name in (*libraries, *(f"ucx/{x}" for x in modules)):
        (site / "libucx/lib" / name).write_text("new")
    text = 'source jobs/env.sh; source jobs/gpu.sh; give_ucx "$0" "$1"; echo $OMPI_MCA_pml'
    for _ in range(2):
        assert machine("-c", text, openmpi, site / "libucx").stdout == "ucx\n"
    found = {str(x.relative_to(openmpi)): x.read_text() for x in openmpi.rglob("*") if x.is_file()}
    new = dict.fromkeys((*libraries, *(f"ucx/{x}" for x in modules)), "new")
    assert found == new | {"libx": "old", "ucx/libx": "old"}


def test_everything_in_one_job(machine):
    """Every part has its seconds, and runs even if other parts fail."""
    asked, made = machine.folder / "asked", machine.folder / "made.py"
    made.write_text("import h5py, sys\nh5py.File(sys.argv[1], 'a').attrs['x'] = 1\n")
    made = f"python {made}"
    # timeout --foreground -k 5 SECONDS COMMAND...
    machine.command("timeout", f"""
echo "$4" >>{asked}
shift 4
case "$*" in
  *"-c import"*Sendrecv*) exit ${{NO_BUFFERS:-0}} ;;
  *"-c import"*) exit 0 ;;
  *h5py*) exec "$@" ;;
  *main_4.h5*) echo "a wrong result"; exit 1 ;;
  *"gpu_transfers.py") exit 124 ;;
  *bench.py*)
    echo "by $A2D_MPI_TRANSFERS"
    [[ $* =~ (out[0-9]*/gpu.h5) ]]; {made} "${{BASH_REMATCH[1]}}" ;;
  *main_1.h5*) [[ $* =~ (out[0-9]*/main_1.h5) ]]; {made} "${{BASH_REMATCH[1]}}" ;;
esac
exit 0""")  # fmt: skip
    found = f"{EMULATED}:{os.environ.get('PYTHONPATH', '')}"
    more = {"PYTHONPATH": found, "A2D_MPI_TRANSFERS": "device"}
    done = machine("jobs/gpu_all.sh", "out", **more, code=1)
    text = (machine.copy / "out/gpu.txt").read_text()
    assert done.stdout == text
    assert "main job on 4: FAILED, exit code 1," in text and "a wrong result" in text
    assert "transfers: FAILED, out of time (30 s)" in text
    assert len(re.findall(r"(?m)^[\w ,]+: passed, \d+ s$", text)) == 17
    assert "no MPS here" in text and "by device" in text
    with h5py.File(machine.copy / "out/gpu.h5") as file:
        assert file.attrs["x"] == file["main/main_1"].attrs["x"] == 1
    assert sorted(os.listdir(machine.copy / "out")) == ["gpu.h5", "gpu.txt"]
    assert max(map(int, asked.read_text().split())) <= 250
    # Some parts only, and what they depend on: where MPI does not take device memory after all,
    # they get that of the host.
    parts = "out1", "@(1 rank|tests*)"
    text = machine("jobs/gpu_all.sh", *parts, **more, NO_BUFFERS="1", code=1).stdout
    assert "device buffers: FAILED, exit code 1," in text and "by host" in text
    assert len(re.findall(r"(?m)^(?=tests)[\w ]+: passed", text)) == 5
    assert len(re.findall(r"(?m)^=== ", text)) == 7
    # Never over the figures of another time.
    done = machine("jobs/gpu_all.sh", "out", PYTHONPATH=found, code=2)
    assert "gpu.h5 exists" in done.stderr
    # Nor ever longer than all parts together have.
    asked.unlink()
    more = {"PYTHONPATH": found, "A2D_MPI_GPU_SECONDS": "0"}
    done = machine("jobs/gpu_all.sh", "out0", **more, code=1)
    assert done.stdout.count("FAILED, out of time") == 18
    assert max(map(int, asked.read_text().split())) <= 10


@pytest.mark.parametrize("starts", [True, False])
def test_mps(machine, starts):
    """NVIDIA's daemon runs for one command and ends, or is not started."""
    log = machine.folder / "log"
    machine.command("nvidia-cuda-mps-control", f"""
[[ $1 == -d ]] || exec cat >>{log}
echo start >>{log}
touch $CUDA_MPS_PIPE_DIRECTORY/control
exit {int(not starts)}""")  # fmt: skip
    machine.command("python", "exit 0")
    text = 'source jobs/env.sh; source jobs/gpu.sh; with_mps bash -c "$0"; echo $?'
    shows = 'ls "${CUDA_MPS_PIPE_DIRECTORY:-/none}" 2>/dev/null; exit 7'
    done = machine("-c", text, shows)
    refused = "MPS cannot be started here: ranks that share a GPU take turns\n"
    assert done.stdout == ("control\n" if starts else refused) + "7\n", done.stderr
    assert log.read_text() == "start\nquit\n"
