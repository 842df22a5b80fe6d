"""The rules of conftest.py, on little test files of their own."""

import json
import re
import shutil

import pytest
from helpers import ROOT, launch

launches = pytest.mark.launches

HEADER = "import conftest\nimport pytest\nfrom helpers import assert_all\n"
# Runs pytest on one file after the other, which saves its start.
EACH = """
import json, pytest, sys
from mpi4py import MPI
for name, *options in json.loads(sys.argv[1]):
    codes = MPI.COMM_WORLD.allgather(int(pytest.main([f"test_{name}.py", *options])))
    if MPI.COMM_WORLD.rank == 0:
        print("exit codes", *codes, flush=True)
"""


def write(folder, name, text):
    """Write a test file with this text and its imports."""
    for needed in ("tests/conftest.py", "tests/support/helpers.py", "setup.cfg"):
        shutil.copy(ROOT / needed, folder)
    (folder / f"test_{name}.py").write_text(HEADER + text)


def run_each(folder, texts, ranks):
    """Run pytest on test files; return exit codes and stdout by name, and all stderr."""
    options = ["--color=no", *["--with-mpi"] * (ranks > 0)]
    for name, text in texts.items():
        write(folder, name, text)
    files = [(name, *options) for name in texts]
    done = launch(ranks, "-c", EACH, json.dumps(files), timeout=120, cwd=folder)
    found = re.split(r"^exit codes ([\d ]+)\n", done.stdout, flags=re.MULTILINE)
    assert len(found) == 2 * len(texts) + 1, done.stdout + done.stderr
    codes = [set(map(int, x.split())) for x in found[1::2]]
    return {name: (*x, done.stderr) for name, x in zip(texts, zip(codes, found[::2]))}


@pytest.fixture
def run(tmp_path):
    """Run pytest on a test file with this text; returns the exit code, stdout and stderr."""

    def run(text, ranks):
        write(tmp_path, "it", text)
        options = ["test_it.py", "--color=no", "--with-mpi"]
        done = launch(ranks, "-m", "pytest", *options, timeout=120, cwd=tmp_path, code=None)
        return done.returncode, done.stdout, done.stderr

    return run


# Without ranks, and so without mpiexec.

SERIAL = {
    "deselected": """
@pytest.mark.mpi
def test_mpi(comm): pass
def test_serial(): pass
""",
    "positional": "@pytest.mark.mpi(2)\ndef test(comm): pass",
    "unknown": "@pytest.mark.mpl\ndef test(): pass",
    "unmarked": "def test(comm): pass",
    "hidden": "@getattr(pytest.mark, 'mpi')\ndef test(comm): pass",
    "skip": """
import unittest
@pytest.fixture
def missing(): pytest.skip("because")
@pytest.mark.skip("because")
def test_mark(): pass
@pytest.mark.skipif(True, reason="because")
def test_condition(): pass
def test_call(): pytest.skip("because")
def test_unittest(): raise unittest.SkipTest("because")
def test_fixture(missing): pass
""",
    "skip_of_file": "pytest.importorskip('no_such_module')\ndef test(): pass",
    "skip_for_gpu": "def test(): pytest.skip('no GPU here')\ndef test_more(): pass",
}


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return run_each(tmp_path_factory.mktemp("serial"), SERIAL, 0)


@pytest.mark.parametrize("name, good, texts", [
    ("deselected", True, ["1 passed, 1 deselected"]),
    ("positional", False, ["test_positional.py::test: mpi takes min_size=N only"]),
    ("unmarked", False, ["test_unmarked.py::test: uses comm but is not marked mpi"]),
    ("hidden", False, ["test_hidden.py::test: is marked, but the file lacks `mark.mpi`"]),
    ("unknown", False, ["'mpl' not found in `markers`"]),
    ("skip", False, ["2 failed, 3 errors", "skipped, which counts as a failure: because"]),
    ("skip_of_file", False, ["skipped, which counts as a failure: could not import"]),
    ("skip_for_gpu", True, ["1 passed, 1 skipped"]),
])  # fmt: skip
def test_serial(serial, name, good, texts):
    codes, out, err = serial[name]
    assert (codes == {0}) == good and (good or 0 not in codes)
    assert all(x in out + err for x in texts), out + err


def test_files_that_need_torch_are_those_that_are_left_out():
    """An ordinary run, without PyTorch, would fail in any other one."""
    needs = r"^(import|from) (torch|transformers|a2d_mpi\.torch)\b"
    files = [
        x for x in (ROOT / "tests").rglob("test_*.py") if re.search(needs, x.read_text(), re.M)
    ]
    assert files and {x.parent for x in files} == {ROOT / "tests" / "torch"}


# On two ranks.

PAIR = {
    "sum": """
@pytest.mark.multirank
@pytest.mark.mpi(min_size=2)
def test_sum(comm):
    assert_all(comm, comm.allreduce(1) == 2, "lost a rank")
""",
    "too_few": """
@pytest.mark.mpi(min_size=4)
def test_4(comm): pass
@pytest.mark.mpi
@pytest.mark.multirank
def test_2(comm): pass
""",
    "misspelt": "@pytest.mark.mpi(minsize=2)\ndef test(comm): pass",
    "setup": """
@pytest.fixture
def broken(comm): assert comm.rank != 1
@pytest.mark.mpi
def test_it(comm, broken): comm.Barrier()
@pytest.mark.mpi
def test_more(comm): comm.Barrier()
""",
    "collected": """
from mpi4py import MPI
@pytest.mark.mpi
@pytest.mark.parametrize("x", range(MPI.COMM_WORLD.rank + 1))
def test_it(comm, x): pass
""",
    "import": """
from mpi4py import MPI
assert MPI.COMM_WORLD.rank == 0, "only here"
@pytest.mark.mpi
def test_it(comm): pass
""",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return run_each(tmp_path_factory.mktemp("pair"), PAIR, 2)


@launches
def test_passes_on_two_ranks_and_only_rank_0_reports(pair):
    codes, out, err = pair["sum"]
    assert codes == {0}
    assert len(re.findall("1 passed", out)) == 1
    assert "[rank" not in out and "test_sum" not in err


@pytest.mark.parametrize("name, texts", [
    ("too_few", ["1 passed, 1 error", "needs 4 ranks, has 2"]),
    ("misspelt", ["test_misspelt.py::test: mpi takes min_size=N only"]),
    ("setup", ["1 passed, 1 error"]),
    ("collected", ["not all ranks collected the same tests"]),
    ("import", ["\n[rank 1] E   AssertionError: only here\n"]),
])  # fmt: skip
def test_pair(pair, name, texts):
    codes, out, err = pair[name]
    assert 0 not in codes
    assert all(x in out + err for x in texts), out + err


def test_one_rank(run):
    code, out, _ = run(PAIR["too_few"], ranks=1)
    assert code != 0
    assert "2 errors" in out
    assert "needs 4 ranks, has 1" in out
    assert "needs 2 ranks, has 1" in out


@launches
def test_failure_on_one_rank(run):
    code, out, err = run(
        """
pytestmark = pytest.mark.mpi
def test_0(comm): assert comm.rank != 0, "zero"
def test_1(comm): assert comm.rank != 1, "one"
def test_step(comm): assert_all(comm, comm.allreduce(1) == 2, "out of step")
def test_said(comm): assert_all(comm, comm.rank != 1, "by one, said to all")
""",
        ranks=2,
    )
    assert code != 0
    assert "3 failed, 1 passed" in out
    assert "AssertionError: zero" in out
    assert "passed on ranks [0]; failed on ranks [1]" in out
    assert "rank 1: by one, said to all" in out
    # On stderr: all of what rank 0 cannot know, and only that.
    assert re.search(r"^\[rank 1\] \S+::test_1 \(call\) failed:$", err, re.MULTILINE)
    assert re.search(r"^\[rank 1\] E +AssertionError: one$", err, re.MULTILINE)
    assert "test_0" not in err
    assert "by one" not in err


@launches
def test_failure_that_leaves_the_others_waiting(run):
    code, _, err = run(
        """
conftest.PATIENCE = 0.5
@pytest.mark.mpi
def test(comm):
    assert comm.rank != 0, "zero"
    comm.recv(source=0)
""",
        ranks=2,
    )
    assert code != 0
    assert re.search(r"^\[rank 0\] E +AssertionError: zero$", err, re.MULTILINE)
    assert "the other ranks did not follow within 0.5 s" in err


@launches
def test_rank_that_dies(run):
    code, *_ = run(
        """
import os, signal
@pytest.mark.mpi
def test_it(comm):
    if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(source=1)
""",
        ranks=2,
    )
    assert code != 0
