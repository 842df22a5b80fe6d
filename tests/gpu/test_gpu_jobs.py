"""Jobs for GPUs, with commands that stand in for those of a machine that has one."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import h5py
import pytest
from helpers import ROOT, drive_on_gpu, execute

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


# Calls of gpu_all.sh, and how many parts they have beside smoke and "device buffers".  One part
# needs MPS.
CALLS = {"first": 4, "figures": 6, "tests": 3, "cudnn": 2, "ranks": 4}


def test_all_calls(machine):
    """Every part has its seconds, and runs even if other parts fail."""
    asked, mps = machine.folder / "asked", machine.folder / "mps"
    # timeout --foreground -k 5 SECONDS COMMAND...
    machine.command("timeout", f"""
[[ $1 == --foreground ]] || {{ shift 3 && exec "$@"; }}
seconds=$4
shift 4
case "$*" in
  find*) exit 0 ;;
  *gpu_smoke.py*) code=${{NO_CUDNN:-0}} ;;
  *"-c import"*Sendrecv*) code=${{NO_BUFFERS:-0}} ;;
  *"-c import"*) exit 0 ;;
  *main_4.h5*) echo "a wrong result"; code=1 ;;
  *"gpu_transfers.py") code=124 ;;
  *bench.py*) echo "by $A2D_MPI_TRANSFERS, MPS in ${{CUDA_MPS_PIPE_DIRECTORY:-none}}" ;;
esac
echo "$seconds" >>{asked}
exit ${{code:-0}}""")  # fmt: skip
    machine.command("nvidia-cuda-mps-control", f"[[ $1 == -d ]] || exec cat >>{mps}")
    found = f"{EMULATED}:{os.environ.get('PYTHONPATH', '')}"
    more = {"PYTHONPATH": found, "A2D_MPI_TRANSFERS": "device"}

    def call(*words, **others):
        asked.unlink(missing_ok=True)
        text = machine("jobs/gpu_all.sh", "out", *words, **more | others).stdout
        assert text == (machine.copy / f"out/{words[0] if words else 'gpu'}.txt").read_text()
        return text, [int(x) for x in asked.read_text().split()]

    for name, parts in CALLS.items():
        text, seconds = call(name, code=int(name == "first"))
        assert len(re.findall(r"(?m)^=== ", text)) == parts + 2 == len(seconds), text
        assert sum(seconds) <= 520 and text.index("=== smoke") < text.index("=== device buffers")
        if name == "first":
            assert "main job on 4: FAILED, exit code 1," in text and "a wrong result" in text
            assert "transfers: FAILED, out of time (30 s)" in text
            assert len(re.findall(r"(?m)^[\w ]+: passed, \d+ s$", text)) == 4
        if name == "ranks":  # with MPS and without
            assert text.count("by device, MPS in none") == 3
            assert text.count("by device, MPS in /") == 1 and mps.read_text() == "quit\n"
    assert sorted(os.listdir(machine.copy / "out")) == sorted(f"{x}.txt" for x in CALLS)
    # Never over the figures of another time.
    done = machine("jobs/gpu_all.sh", "out", "first", **more, code=2)
    assert done.stderr == "gpu_all.sh: out/first.txt exists\n"
    # Nothing runs on a GPU on which cuDNN does not compute.
    (machine.copy / "out/ranks.txt").unlink()
    text, seconds = call("ranks", code=1, NO_CUDNN="1")
    assert text.endswith("must be mended first.\n") and len(seconds) == 1
    # All parts but some, without MPS.  They get host memory if MPI does not take device memory.
    (machine.folder / "bin/nvidia-cuda-mps-control").unlink()
    done = machine("jobs/gpu_all.sh", "out1", "!(smoke|tests*)", **more, NO_BUFFERS="1", code=1)
    text = done.stdout
    assert "device buffers: FAILED, exit code 1," in text and "no MPS here" in text
    assert text.count("by host, MPS in none") == 9 and "=== smoke" not in text
    # All in one call, which never takes longer than all of its parts together may.
    text = machine("jobs/gpu_all.sh", "out2", **more, code=1).stdout
    assert len(re.findall(r"(?m)^=== ", text)) == sum(CALLS.values()) - 1 + 2
    asked.unlink()
    none = {"A2D_MPI_GPU_SECONDS": "0"}
    text = machine("jobs/gpu_all.sh", "out3", "!(smoke)", **more, **none, code=1).stdout
    assert text.count("FAILED, out of time") == sum(CALLS.values()) - 1 + 1
    assert not asked.exists()


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("job", ["jobs/gpu_all.sh", "jobs/test.sh gpu", "jobs/run.py gpu local"])
def test_no_gpu(machine, found, job):
    """One sentence, and exit code 2."""
    if found:
        machine.command("nvidia-smi", "exit 9")
    else:
        (machine.folder / "bin/nvidia-smi").unlink()
        if shutil.which("nvidia-smi"):
            pytest.skip("no GPU can be taken away here: nvidia-smi is installed")
    done = machine(*job.split(), code=2)
    missing = "nvidia-smi finds none" if found else "found no nvidia-smi, so no NVIDIA driver"
    assert done.stderr == f"No GPU: {missing}.\n"
    assert not list(machine.copy.glob("results")) and not list(machine.copy.glob(".venv*"))


def test_a_machine_without_python_and_loopback(machine):
    """A Python that is called python3 only is used, also by ranks, and `lo` is raised."""
    machine.command("python3", f'exec {sys.executable} "$@"')
    machine.command("ip", f"echo $* >>{machine.folder}/ip")
    for name in ("bash", "cat", "chmod", "cksum", "dirname", "grep", "head", "mkdir", "rm"):
        (machine.folder / "bin" / name).symlink_to(shutil.which(name))
    text = "source jobs/env.sh; source jobs/gpu.sh; use_gpu && bash -c "
    text += """'python -c "import cupy, sys; print(sys.executable)"; echo $OPENBLAS_CORETYPE'"""
    path = {"PATH": str(machine.folder / "bin"), "PYTHONPATH": str(EMULATED)}
    done = machine("-c", text, **path, MPIEXEC="cat", OPENBLAS_CORETYPE="Sandybridge")
    assert done.stdout == f"{sys.executable}\nSandybridge\n"
    assert (machine.folder / "ip").read_text() == "link set lo up\n"


@pytest.mark.parametrize("own", [None, "Zen"])
def test_programs_get_the_cpu_type_that_the_package_chooses(machine, own):
    """Also programs that import NumPy before the package.  A value of the user stays."""
    package = machine.folder / "site/a2d_mpi"
    package.mkdir(parents=True)
    chooses = 'import os; os.environ.setdefault("OPENBLAS_CORETYPE", "Prescott")'
    (package / "__init__.py").write_text(chooses)
    text = "unset OPENBLAS_CORETYPE; " if own is None else ""
    text += "source jobs/env.sh; use_env any; printenv OPENBLAS_CORETYPE"
    path = {"PYTHONPATH": f"{package.parent}:{machine.copy.resolve()}/src"}
    done = machine("-c", text, **path, OPENBLAS_CORETYPE=own or "")
    assert done.stdout == f"{own or 'Prescott'}\n"


# cuDNN's graphs on the emulated GPU, all of which may be refused.
GRAPHS = """
import graphs, a2d_mpi.kernels.graphs as g
shapes = "full", "causal", "anti-causal", "band", "general"
made = graphs.HostGraphs(shapes if {} else ())
g.graphs_of = lambda index: made
"""
NOT_KNOWN = "g.supported = lambda *_: 'not known'"
# A product of matrices in no time: attention has a tiny share of its speed.
QUICK = """
import cupy
cupy.ndarray.__matmul__ = lambda a, b: a
cupy.cuda.MemoryPointer.copy_from_device_async = lambda *_: None
"""


@pytest.mark.parametrize("sabotage, least, failed", [
    (GRAPHS.format(0), 0, []),
    (GRAPHS.format(1), 0, ["cuDNN refused a graph: ", "the plain kernel computed blocks, "]),
    (GRAPHS.format(0) + NOT_KNOWN, 0, ["the plain kernel computed blocks, "]),
    (GRAPHS.format(0) + QUICK, 0.15, ["forward of Full() has 0.0", "backward of Full() has 0.0"]),
], ids=["right", "refused", "not known", "slow"])  # fmt: skip
def test_smoke_test(monkeypatch, sabotage, least, failed):
    """It fails if cuDNN refuses graphs, the plain kernel computes, or attention is slow."""
    options = ["--shape", 64, 2, 16, "--least", least]
    done = drive_on_gpu(
        monkeypatch, "../tests/gpu/gpu_smoke.py", 1, *options, sabotage=sabotage, code=None
    )
    said = [x for x in done.stdout.splitlines() if x.startswith("FAILED: ")]
    assert done.returncode == (1 if failed else 0), done.stdout + done.stderr
    assert all(any(x.startswith(f"FAILED: {y}") for x in said) for y in failed), said
    assert ("cuDNN computed everything, by 6 graphs" in done.stdout) == (not failed)
    assert len(re.findall(r"(?m)^\w.*, (?:for|back)ward: \S+ TFLOP/s", done.stdout)) == 6


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
    shows = 'ls "${CUDA_MPS_PIPE_DIRECTORY:-/none}" 2>/dev/null || echo none; exit 7'
    done = machine("-c", text, shows)
    if starts:  # a command that fails runs again without MPS
        said = "control\nwith MPS the exit code was 7: again without MPS\n"
    else:
        said = "MPS cannot be started here: ranks that share a GPU take turns\n"
    assert done.stdout == f"{said}none\n7\n", done.stderr
    assert log.read_text() == "start\nquit\n"
