"""Jobs for GPUs, with commands that stand in for those of a machine that has one."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import DEEPER, ROOT, drive_on_gpu, execute

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
        return execute(program, *job, cwd=copy, env=env | more, code=code)

    command("nvidia-smi", "echo 'CUDA Version: 13.0'")
    run.command, run.copy, run.folder = command, copy, tmp_path
    return run


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
    pytest.param(GRAPHS.format(0) + QUICK, 0.15,
                 [f"{x} of Full() has 0.0" for x in ("forward", "backward")], marks=DEEPER),
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
