"""Jobs for GPUs, with commands that stand in for those of a machine that has one."""

import os
import re
import shutil
import sys
from pathlib import Path

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
    assert ("cuDNN computed everything, by 5 graphs" in done.stdout) == (not failed)
    assert len(re.findall(r"(?m)^\w.*, (?:for|back)ward: \S+ TFLOP/s", done.stdout)) == 6
