"""drivers/attention.py as its users run it, and everything that can be wrong with what they give.

Bad input: exit code 2, one message, from rank 0, within seconds; nothing hangs, nothing is left.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import h5py
import helpers
import numpy as np
import pytest
from helpers import (
    DRIVERS,
    ENVIRONMENT,
    MPIEXEC,
    SECONDS,
    assert_all_refused,
    assert_refused,
)

from a2d_mpi import Causal, Distribution
from a2d_mpi.core import reference
from a2d_mpi.experiments.results import read_result
from a2d_mpi.planning import cost

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "data" / "minilm_l3_1536.h5"

drive = partial(helpers.drive, "attention.py")


@pytest.mark.parametrize("options", [
    ["--rows", "2", "--cols", "2", "--backward", "--check", "full"],
    ["--rows", "1", "--method", "ring", "--mask", "full", "--backward", "--dtype", "float64"],
    ["--method", "double_ring", "--inner", "2", "--backward", "--check", "full"],
    ["--cols", "1", "--distribution", "striped", "--no-overlap", "--check", "none"],
    ["--dtype", "bfloat16", "--backward", "--check", "full", "--save-outputs"],
], ids=["2x2", "ring", "double ring", "4x1", "bfloat16"])  # fmt: skip
def test_main_job(tmp_path, options):
    output = tmp_path / "run.h5"
    done = drive(4, SAMPLE, "--seqlen", "301", "--trials", "3", "--output", output, *options)
    assert done.returncode == 0, done.stderr
    assert "written to" in done.stdout and "FAILED" not in done.stdout
    result = read_result(output)
    assert result.config["seqlen"] == 301
    phases = ["forward", "backward"] if "--backward" in options else ["forward"]
    assert set(result.timings) == {
        f"{phase}/{part}" for phase in phases for part in ("compute", "merge", "wait", "total")
    }
    for seconds in result.timings.values():
        assert seconds.shape == (3, 4) and (seconds >= 0).all()
    for counts in result.traffic.values():
        assert np.array_equal(counts["sent"], counts["predicted_sent"])
        assert np.array_equal(counts["received"], counts["predicted_received"])
        assert counts["received"].sum() > 0
    assert {name.split("/")[0] for name in result.traffic} == set(phases)
    names = {"traffic"}
    if "none" not in options:
        names |= {"repeat", "out", "lse"} | (
            {"dq", "dk", "dv"} if "--backward" in options else set()
        )
    assert set(result.checks) == names
    assert all(check.passed for check in result.checks.values())
    full = result.config["mask"] == "full"
    assert result.area.sum() == (301 * 301 if full else 301 * 302 // 2)
    if "--save-outputs" in options:
        assert result.outputs["dq"].shape == (301, 12, 32)


def test_outputs_are_the_attention_of_the_file(tmp_path):
    output = tmp_path / "run.h5"
    done = drive(
        2, SAMPLE, "--seqlen", "100", "--trials", "1", "--dtype", "float64", "--backward",
        "--output", output, "--save-outputs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with h5py.File(SAMPLE) as file:
        q, k, v = (file[name][:100].astype(np.float64) for name in "qkv")
    visible = Causal().dense(np.arange(100), np.arange(100))
    out, lse = reference.attention(q, k, v, visible, 32**-0.5)
    outputs = read_result(output).outputs
    assert set(outputs) == {"out", "lse", "dq", "dk", "dv"}
    assert outputs["out"] == pytest.approx(out, rel=1e-12, abs=1e-13)
    assert outputs["lse"] == pytest.approx(lse, rel=1e-12)


def test_gradients_do_not_depend_on_the_ranks(tmp_path):
    found = []
    for ranks, options in ((1, []), (3, ["--rows", "3", "--distribution", "striped"])):
        output = tmp_path / f"{ranks}.h5"
        done = drive(ranks, SAMPLE, "--seqlen", "90", "--trials", "1", "--dtype", "float64",
                     "--backward", "--save-outputs", "--output", output, *options)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(read_result(output).outputs["dk"])
    assert found[0] == pytest.approx(found[1], rel=1e-10, abs=1e-12)
    assert np.abs(found[0]).max() > 0.1


def test_dout_of_the_file_is_used(tmp_path):
    path, output = tmp_path / "zero.h5", tmp_path / "run.h5"
    shutil.copy(SAMPLE, path)
    with h5py.File(path, "a") as file:
        file["dout"] = np.zeros(file["q"].shape, "f4")
    done = drive(2, path, "--seqlen", "50", "--trials", "1", "--backward", "--save-outputs",
                 "--output", output)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (read_result(output).outputs["dv"] == 0).all()


@pytest.mark.parametrize("check", ["sample", "full"])
def test_failed_check(tmp_path, check):
    """A wrong result is reported, kept, and the exit code is 1."""
    output = tmp_path / "run.h5"
    done = drive(
        2, SAMPLE, "--seqlen", "64", "--cols", "2", "--check", check, "--output", output,
        sabotage="import a2d_mpi.devices.host as b; b.merge = lambda *_: None",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    assert not read_result(output).checks["out"].passed


def test_one_trial_that_differs_fails():
    done = drive(
        2, SAMPLE, "--seqlen", "64", "--trials", "4",
        sabotage="import a2d_mpi.attention.plan as p; old, calls = p.AttentionPlan.forward, []\n"
        "def forward(*x):\n    calls.append(0); out, lse = old(*x)\n"
        "    return out + (len(calls) == 3 and rank == 1), lse\n"
        "p.AttentionPlan.forward = forward",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search("repeat .*FAILED", done.stdout)


def test_miscounted_traffic_fails(tmp_path):
    done = drive(
        2, SAMPLE, "--seqlen", "64", "--check", "none",
        sabotage="from a2d_mpi.comm.channel import Traffic as T; old = T.count\n"
        "T.count = lambda self, p, n, d, b, m: old(self, p, n, d, b + (rank == 1), m)",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search("traffic .*FAILED", done.stdout)


OPTIONS = [
    (["--rows", "3"], "3 rows do not divide 2 ranks"),
    (["--cols", "3"], "3 columns do not divide 2 ranks"),
    (["--rows", "2", "--heads", "2"], "2 rows x 2 ranks a cell do not divide 2 ranks"),
    (["--rows", "2", "--cols", "2"], "2 x 2 grid does not fit 2 ranks"),
    (["--inner", "2"], "--inner needs --method double_ring"),
    (["--method", "double_ring", "--inner", "3"], "inner must be a divisor of the 2 ranks, got 3"),
    (["--method", "triple_ring"], "must be one of attention2d, ring, striped ring, double ring"),
    (["--method", "striped ring", "--distribution", "zigzag"], "has no zigzag distribution"),
    (["--rows", "-1"], "--rows must be at least 1, got -1"),
    (["--cols", "0"], "--cols must be at least 1, got 0"),
    (["--heads", "0"], "--heads must be at least 1, got 0"),
    (["--seqlen", "1537"], "1536 tokens"),
    (["--seqlen", "0"], "--seqlen must be at least 1, got 0"),
    (["--trials", "0"], "--trials must be at least 1, got 0"),
    (["--trials", "1000000000000"], "--trials must be at most 1000000, got 1000000000000"),
    (["--trials", "9" * 5000], "--trials must be at most 1000000, got one of 5000 digits"),
    (["--trials", "-" + "9" * 5000], "--trials must be at least 1, got one of 5000 digits"),
    (["--trials", "many"], "--trials must be a whole number, got 'many'"),
    (["--warmup", "-1"], "--warmup must be at least 0, got -1"),
    (["--threads", "0"], "--threads must be at least 1, got 0"),
    (["--threads", "1000000000"], "--threads must be at most 1024, got 1000000000"),
    (["--seed", "-1"], "--seed must be at least 0, got -1"),
    (["--seed", str(1 << 64)], "--seed must be at most 9223372036854775807, got 1844674407370955"),
    (["--mask", "sparse"], "sparse"),
    (["--no-such-option"], "--no-such-option"),
    (["--save-outputs"], "--output"),
]


def test_bad_options():
    assert_all_refused("attention.py", 2, [([SAMPLE, *x], [], text) for x, text in OPTIONS])


@pytest.mark.parametrize("what", ["missing", "folder", "text", "truncated", "schema", "nan"])
def test_bad_input_file(tmp_path, what):
    path, output = tmp_path / "input.h5", tmp_path / "run.h5"
    text = {
        "missing": "No such file",
        "folder": "input.h5",
        "text": "input.h5",
        "truncated": "input.h5",
        "schema": "schema",
        "nan": "k has 2 elements that are NaN or infinite: nothing can be checked (on rank 1)",
    }[what]
    if what == "folder":
        path.mkdir()
    elif what == "text":
        path.write_text("q k v")
    elif what == "truncated":
        path.write_bytes(SAMPLE.read_bytes()[:100_000])
    elif what != "missing":
        shutil.copy(SAMPLE, path)
        with h5py.File(path, "a") as file:
            if what == "schema":
                file.attrs["schema_version"] = 2
            else:
                token = Distribution("zigzag", 1536, 2).tokens(1)[5]
                file["k"][token, 3, :2] = np.nan, np.inf
    assert_refused(drive(2, path, "--output", output), text)
    assert [x.name for x in tmp_path.iterdir() if x != path] == []


DIFFERENT = [
    (["--mask", "full"], "ranks disagree on --mask: causal on rank 0, full on rank 1"),
    (["--seqlen", "99"], "ranks disagree on --seqlen: None on rank 0, 99 on rank 1"),
    (["--rows", "1"], "ranks disagree on --rows: 2 on rank 0, 1 on rank 1"),
    (["--trials", "9"], "ranks disagree on --trials: 5 on rank 0, 9 on rank 1"),
    (["--trials", "x"], "must be a whole number, got 'x' (see --help) (on rank 1)"),
    (["--help"], "ranks disagree on --help: False on rank 0, True on rank 1"),
    (["--backward"], "ranks disagree on --backward: False on rank 0, True on rank 1"),
    (["--output", "none.h5"], "ranks disagree on --output: None on rank 0, none.h5 on rank 1"),
]


def test_options_that_differ_on_one_rank():
    common = [SAMPLE, "--rows", "2"]
    assert_all_refused("attention.py", 2, [(common, more, text) for more, text in DIFFERENT])


def test_input_that_is_missing_on_one_rank():
    done = drive(2, SAMPLE, sabotage="sys.argv[1] = '/none/q.h5' if rank == 1 else sys.argv[1]")
    assert_refused(done, "/none/q.h5")


@pytest.mark.parametrize("where", ["no such folder", "folder", "under a file"])
def test_unwritable_output(tmp_path, where):
    (tmp_path / "file").write_text("")
    output = {
        "no such folder": tmp_path / "none" / "run.h5",
        "folder": tmp_path,
        "under a file": tmp_path / "file" / "run.h5",
    }[where]
    assert_refused(drive(2, SAMPLE, "--output", output), f"cannot write {output}")
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("found", ["before the run", "while writing"])
def test_full_disk(tmp_path, found):
    """No file may grow beyond 100 kB; the result of an earlier run stays as it was."""
    output = tmp_path / "run.h5"
    output.write_text("precious")
    sabotage = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    if found == "while writing":
        sabotage += "import a2d_mpi.core.atomic as r; r.check_writable = lambda *_: None"
    done = drive(2, SAMPLE, "--output", output, "--save-outputs", sabotage=sabotage)
    assert_refused(done, f"cannot write {output}: File too large")
    assert output.read_text() == "precious"
    assert [x.name for x in tmp_path.iterdir()] == ["run.h5"]
    assert ("passed" in done.stdout) == (found == "while writing")  # nothing that is known is lost


@pytest.mark.parametrize("how", ["raise RuntimeError('a defect')", "os.kill(os.getpid(), 9)"])
def test_rank_that_dies_ends_the_job(how):
    """A defect or a kill in the middle of a run: the job ends, soon and with an error."""
    done = drive(
        3, SAMPLE,
        sabotage="import os, a2d_mpi.kernels.numpy as t\n"
        "def forward(*_):\n"
        f"    if rank == 1: {how}\n"
        "t.NumpyTile.forward = forward",
    )  # fmt: skip
    assert done.returncode not in (0, 1, 2)
    assert done.seconds < SECONDS
    if "raise" in how:
        assert "rank 1 failed" in done.stderr and "a defect" in done.stderr


DRIVERS_OF_RANKS = ("attention", "bench", "bench_overlap", "bench_gpu")


@pytest.mark.parametrize("program", DRIVERS_OF_RANKS)
def test_help_is_printed_once(program):
    done = helpers.drive(f"{program}.py", 2, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage:") == 1
    if program in DRIVERS_OF_RANKS[:2]:
        text = " ".join(done.stdout.split())
        assert ", ".join(cost.METHODS) in text and "r (rows), c (columns) and u (ranks" in text


def test_options_of_other_drivers():
    number = (["--trials", "0"], [], "--trials must be at least 1, got 0")
    huge = (
        ["--seqlen", "99999999999"],
        [],
        "--seqlen must be at most 2147483648, got 99999999999",
    )
    assert_all_refused("bench_overlap.py", 2, [number, huge])
    both = [(["kernel", *options], more, text) for options, more, text in (number, huge)]
    assert_all_refused("bench_gpu.py", 2, both)
    huge = (["--shapes", "99999999999x4x128"], [], "seqlen must be at most 2147483648, got 99")
    assert_all_refused("bench_tile.py", 0, [number, huge, (["--shapes", "1x2"], [], "got '1x2'")])


@pytest.mark.parametrize("how", ["same", "symlink", "hard link", "loop"])
def test_output_that_is_the_input(tmp_path, how):
    path, output = tmp_path / "input.h5", tmp_path / "run.h5"
    shutil.copy(SAMPLE, path)
    text = f"cannot write {output}: it is the input {path}"
    if how == "same":
        output = tmp_path / "." / ".." / tmp_path.name / "input.h5"
        text = "it is the input"
    elif how == "symlink":
        output.symlink_to("input.h5")
    elif how == "hard link":
        output.hardlink_to(path)
    else:
        output.symlink_to("run.h5")
        text = f"cannot write {output}: Too many levels of symbolic links"
    before = sorted((x.name, x.lstat().st_ino) for x in tmp_path.iterdir())
    assert_refused(drive(2, path, "--output", output), text)
    assert sorted((x.name, x.lstat().st_ino) for x in tmp_path.iterdir()) == before
    assert path.read_bytes() == SAMPLE.read_bytes()


def test_striped_ring(tmp_path):
    output = tmp_path / "run.h5"
    options = ["--seqlen", "64", "--trials", "1", "--output", output]
    for method in ("striped ring", "double_ring"):
        done = drive(2, SAMPLE, *options, "--method", method)
        assert done.returncode == 0, done.stderr
        config = read_result(output).config
        assert config["method"] == method.replace("_", " ")
        assert config["distribution"] == ("striped" if method == "striped ring" else "zigzag")


# Nobody reads what the ranks print: rank 0's pipe, or all that they have, is closed.
UNREAD = {
    "stdout": "r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
    "stderr": "r, w = os.pipe(); os.close(r); os.dup2(w, 2)",
    "neither": "os.close(1); os.close(2); sys.stdout = sys.stderr = None",
}


@pytest.mark.parametrize("which", UNREAD)
def test_result_is_kept_whoever_reads(tmp_path, which):
    output = tmp_path / "run.h5"
    options = ["--seqlen", "64", "--trials", "2", "--output", output]
    done = drive(2, SAMPLE, *options, sabotage=UNREAD[which])
    assert done.returncode == 0, done.stderr
    assert read_result(output).passed
    assert "Error" not in done.stderr and "Exception" not in done.stderr
    done = drive(2, SAMPLE, *options, "--rows", "3", sabotage=UNREAD[which])
    assert done.returncode == 2


def test_result_is_kept_before_it_is_printed(tmp_path):
    output = tmp_path / "run.h5"
    done = drive(
        1, SAMPLE, "--seqlen", "64", "--output", output,
        sabotage="import builtins; builtins.print = lambda *_, **__: os._exit(9)",
    )  # fmt: skip
    assert done.returncode not in (0, 1, 2)
    assert read_result(output).passed


def test_overflow_is_a_failed_check_and_no_warning():
    """Every rank would warn, again and again."""
    done = drive(
        2, SAMPLE, "--seqlen", "64", "--trials", "2", "--backward",
        sabotage="import numpy as np, a2d_mpi.experiments.results as r\nold = r.read_part\n"
        "r.read_part = lambda *x: old(*x) * np.float32(1e18)",
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search("dk .*FAILED: not finite", done.stdout)
    assert "Warning" not in done.stderr, done.stderr


def test_head_is_no_error(tmp_path):
    """As `| head -1`: of the launcher, what nobody reads is lost, and nothing else."""
    output = tmp_path / "run.h5"
    command = (
        f"{shlex.join(map(str, [MPIEXEC, '-n', 2, sys.executable, DRIVERS / 'attention.py']))}"
    )
    command += f" {SAMPLE} --seqlen 64 --trials 2 --output {output} | head -1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60,
                          env=os.environ | ENVIRONMENT)  # fmt: skip
    assert done.stdout.startswith("attention2d on") and done.stdout.count("\n") == 1
    assert read_result(output).passed
    assert "Error" not in done.stderr and "killed" not in done.stderr, done.stderr
