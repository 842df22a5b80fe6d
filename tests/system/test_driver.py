"""drivers/attention.py as users run it, and all kinds of bad input.

Bad input: exit code 2, one message, from rank 0, within seconds; nothing hangs, nothing is left.
"""

import json
import re
import shlex
import shutil
import sys
from functools import partial
from hashlib import sha256

import h5py
import helpers
import numpy as np
import pytest
from helpers import (
    DRIVERS,
    ENVIRONMENT,
    MPIEXEC,
    SAMPLE,
    assert_refused,
    drive_each,
    execute,
    parser_of,
    read_run,
)
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.commands import attention as job
from a2d_mpi.core import reference

# The others, in which MPI has no part: what is wrong is found, and said, in Python.
launches = pytest.mark.launches


drive = partial(helpers.drive, "attention.py")


MAIN = {
    "2x2": ["--rows", "2", "--cols", "2", "--backward", "--check", "full"],
    "ring": ["--rows", "1", "--method", "ring", "--mask", "full", "--backward", "--dtype",
             "float64", "--save-outputs"],
    "double ring": ["--method", "double_ring", "--rows", "2", "--backward", "--check", "full"],
    "4x1": ["--cols", "1", "--distribution", "striped", "--no-overlap", "--check", "none"],
    "bfloat16": ["--dtype", "bfloat16", "--backward", "--check", "full", "--save-outputs"],
}  # fmt: skip


@pytest.fixture(scope="module")
def main_jobs(tmp_path_factory):
    """Run MAIN on four ranks; return the folder, the exit codes and stdout."""
    folder = tmp_path_factory.mktemp("main")
    shutil.copy(SAMPLE, zero := folder / "zero.h5")
    with h5py.File(zero, "a") as file:
        file["dout"] = np.zeros(file["q"].shape, "f4")
    common = ["--seqlen", "301", "--trials", "3", "--output"]
    cases = [[SAMPLE, *common, folder / f"{x}.h5", *MAIN[x]] for x in MAIN]
    cases[0] += ["--trace", folder / "trace.json"]
    cases += [[zero, *common, folder / "zero dout.h5", "--backward", "--save-outputs"], ["--help"]]
    done, found = drive_each([("attention.py", x, []) for x in cases], 4)
    assert done.stdout.count("usage:") == 1  # one rank prints the help
    assert found[-2][0] == 0, done.stdout  # bounds of gradients that are 0
    return folder, dict(zip(MAIN, found)), done.stderr


@launches
@pytest.mark.parametrize("name", MAIN)
def test_main_job(main_jobs, name):
    folder, found, stderr = main_jobs
    (code, stdout), options = found[name], MAIN[name]
    assert code == 0, stderr
    assert "written to" in stdout and "FAILED" not in stdout
    assert re.search(r"kernel \w+, 1 thread of each rank, .*MPI.*, 4 ranks on \w", stdout)
    result = read_run(folder / f"{name}.h5")
    assert result["config"]["seqlen"] == 301 and result["config"]["ranks"] == 4
    assert result["origin"]["input_sha256"] == sha256(SAMPLE.read_bytes()).hexdigest()
    phases = ["forward", "backward"] if "--backward" in options else ["forward"]
    assert result["timings"].keys() == result["traffic"].keys() == set(phases)
    for timings in result["timings"].values():
        assert timings.keys() == {"compute", "merge", "wait", "total"}
        assert all(x.shape == (3, 4) and (x >= 0).all() for x in timings.values())
        parts = sum(timings[part] for part in ("compute", "merge", "wait"))
        assert (parts > 0).all() and (parts <= timings["total"]).all()
    for counts in [x for channels in result["traffic"].values() for x in channels.values()]:
        assert np.array_equal(counts["sent"], counts["predicted_sent"])
        assert np.array_equal(counts["received"], counts["predicted_received"])
        assert counts["received"].sum() > 0
    names = {"traffic"}
    if "none" not in options:
        names |= {"repeat", "inputs", "out", "lse"} | (
            {"dq", "dk", "dv"} if "--backward" in options else set()
        )
    assert set(result["checks"]) == names
    assert all(check["passed"] for check in result["checks"].values())
    assert name != "double ring" or result["config"]["distribution"] == "zigzag"
    full = result["config"]["mask"] == "full"
    assert result["area"].sum() == (301 * 301 if full else 301 * 302 // 2)
    if "--save-outputs" in options:
        assert result["outputs"]["dq"].shape == (301, 12, 32)


def test_trace(main_jobs):
    """Each rank's calls are there; tests/system/test_trace.py looks at all events."""
    events = json.loads((main_jobs[0] / "trace.json").read_text())["traceEvents"]
    for rank in range(4):
        calls = [x["name"] for x in events if (x.get("cat"), x["pid"]) == ("total", rank)]
        assert calls == ["attention2d forward", "attention2d backward"]


def test_outputs_are_the_attention_of_the_file(main_jobs):
    folder, *_ = main_jobs
    with h5py.File(SAMPLE) as file:
        q, k, v = (file[name][:301].astype(np.float64) for name in "qkv")
    out, lse = reference.attention(q, k, v, np.ones((301, 301), bool), 32**-0.5)
    outputs = read_run(folder / "ring.h5")["outputs"]
    assert set(outputs) == {"out", "lse", "dq", "dk", "dv"}
    np.testing.assert_allclose(outputs["out"], out, 1e-12, 1e-13)
    np.testing.assert_allclose(outputs["lse"], lse, 1e-12)
    zero = read_run(folder / "zero dout.h5")["outputs"]
    assert (zero["dv"] == 0).all() and np.abs(outputs["dv"]).max() > 0.1


@launches
def test_failed_check(tmp_path):
    """A wrong result is reported and kept, and the exit code is 1."""
    output = tmp_path / "run.h5"
    done = drive(
        2, SAMPLE, "--seqlen", "64", "--cols", "2", "--output", output,
        sabotage="import a2d_mpi.devices.host as b; b.merge = lambda *_: None",
        code=1,
    )  # fmt: skip
    assert "FAILED" in done.stdout
    assert not read_run(output)["checks"]["out"]["passed"]


@pytest.mark.parametrize("found", ["before the run", "while writing"])
def test_full_disk(tmp_path, found):
    """If no file may grow beyond 100 kB, the result of an earlier run stays as it was."""
    output = tmp_path / "run.h5"
    output.write_text("precious")
    sabotage = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    if found == "while writing":
        sabotage += "import a2d_mpi.core.atomic as r; r.check_writable = lambda *_: None"
    done = drive(2, SAMPLE, "--output", output, "--save-outputs", sabotage=sabotage, code=2)
    assert_refused(done, f"cannot write {output}: File too large")
    assert output.read_text() == "precious"
    assert [x.name for x in tmp_path.iterdir()] == ["run.h5"]
    assert ("passed" in done.stdout) == (found == "while writing")  # nothing that is known is lost


@pytest.mark.parametrize("options, outputs", [
    ("--dtype bfloat16 --save-outputs", 12 * (32 * 2 + 4)),  # out and lse
    ("--dtype float64 --save-outputs --backward", 12 * (4 * 32 * 8 + 8)),
    ("--backward", 0),
])  # fmt: skip
def test_size_of_the_file(monkeypatch, options, outputs):
    """The bytes that are looked for on the disk are those of the results that are written."""
    asked = []

    def check(path, schema, nbytes):
        asked.append(nbytes)
        raise OSError("no room")

    monkeypatch.setattr(job, "check_output", check)
    given = [str(SAMPLE), "--output", "x.h5", *options.split()]
    with pytest.raises(CollectiveError, match="no room"):
        job.attention(MPI.COMM_SELF, parser_of("drivers/attention.py").parse_args(given))
    assert asked == [1536 * outputs + (1 << 20)]


DIES = """
import a2d_mpi.kernels.numpy as t
def forward(*_, **__):
    if rank == 1: {}
t.NumpyKernel.forward = forward
"""
# The other ranks wait for this rank, which does not wait for them.
PART = """
import a2d_mpi.cli.run as cli
import a2d_mpi.commands.attention as job
from a2d_mpi.comm.agreement import CollectiveError
def open_grid(comm, *_):
    if rank == 1:
        raise CollectiveError("of a part of the ranks")
    comm.Barrier()
job.open_grid = open_grid
cli.PATIENCE = 1
"""


@launches
@pytest.mark.parametrize("sabotage, said", [
    ("if rank: sys.modules['a2d_mpi.commands.attention'] = None",  # before the program begins
     "import of a2d_mpi.commands.attention halted"),
    (PART, "attention.py: rank 1 failed, others did not: of a part of the ranks"),
    (DIES.format("raise RuntimeError('a defect')"), "a defect"),
    (DIES.format("os.kill(os.getpid(), 2)"), "rank 1 interrupted\n"),
    pytest.param(DIES.format("os.kill(os.getpid(), 9)"), "", marks=pytest.mark.thorough),
], ids=["import", "collective error", "defect", "Ctrl-C", "kill"])  # fmt: skip
def test_a_rank_that_fails_ends_the_job(sabotage, said):
    done = drive(2, SAMPLE, sabotage=sabotage, code=None)
    assert done.returncode, done.stderr
    assert said in done.stderr and ("interrupted" not in said or "Traceback" not in done.stderr)
    assert "defect" not in said or "rank 1 failed" in done.stderr
    assert "kernels" not in sabotage or done.returncode not in (1, 2)


def test_heads_before_tokens(tmp_path):
    """A remark on stderr names the order; --quiet keeps warnings."""
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        file.attrs.update({"schema": "a2d_mpi input", "schema_version": 1})
        for name in "qkv":
            file[name] = np.ones((8, 1000, 4), "f4")
    done = drive(1, path, "--trials", "1", "--quiet")
    told = "has 8 tokens of 1000 heads, because tensors are (tokens, heads, headdim)"
    assert done.stderr.count(told) == 1


@launches
def test_no_file_of_a_job_that_dies_while_it_writes(tmp_path):
    """The file of an earlier job stays as it was, if a rank dies before its rows have come."""
    (output := tmp_path / "run.h5").touch()  # an empty file may be replaced
    sabotage = "import a2d_mpi.checks.measure as m\n"
    sabotage += "if rank: m.Measurement.outputs = lambda *_: (time.sleep(1), os._exit(9))"
    options = ["--seqlen", "64", "--trials", "1", "--save-outputs", "--output", output]
    done = drive(2, SAMPLE, *options, sabotage=f"import time; {sabotage}", code=None)
    assert done.returncode and output.read_bytes() == b""


def test_result_is_written_before_it_is_printed(tmp_path):
    output = tmp_path / "run.h5"
    options = ["--seqlen", "64", "--trials", "2", "--output", output]
    killed = "import builtins; builtins.print = lambda *_, **__: os._exit(9)"
    drive(1, SAMPLE, *options, sabotage=killed, code=None)
    assert read_run(output)["passed"]


@launches
def test_head_is_no_error(tmp_path):
    """A reader that stops, such as `| head -1`, is no error."""
    output = tmp_path / "run.h5"
    command = shlex.join(map(str, [*MPIEXEC, "-n", 2, sys.executable, DRIVERS / "attention.py"]))
    command += f" {SAMPLE} --seqlen 64 --trials 2 --output {output} | head -1"
    done = execute("/bin/sh", "-c", command, env=ENVIRONMENT)
    assert done.stdout.startswith("attention2d on") and done.stdout.count("\n") == 1
    assert read_run(output)["passed"]
    assert "Error" not in done.stderr and "killed" not in done.stderr, done.stderr
