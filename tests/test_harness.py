"""The rules of conftest.py, on little test files of their own."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import launch

pytestmark = pytest.mark.launches

HERE = Path(__file__).parent
HEADER = "import conftest\nimport pytest\nfrom helpers import assert_all\n"


@pytest.fixture
def run(tmp_path):
    """Run pytest on a test file with this text; returns the exit code, stdout and stderr."""
    for name in ("conftest.py", "helpers.py"):
        shutil.copy(HERE / name, tmp_path)
    shutil.copy(HERE.parent / "setup.cfg", tmp_path)

    def run(text, ranks=0):
        (tmp_path / "test_it.py").write_text(HEADER + text)
        options = ["test_it.py", "--color=no", *["--with-mpi"] * (ranks > 0)]
        done = launch(ranks, "-m", "pytest", *options, timeout=120, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


def test_passes_on_two_ranks_and_only_rank_0_reports(run):
    code, out, err = run(
        """
@pytest.mark.multirank
@pytest.mark.mpi(min_size=2)
def test_sum(comm):
    assert_all(comm, comm.allreduce(1) == 2, "lost a rank")
""",
        ranks=2,
    )
    assert code == 0
    assert len(re.findall("1 passed", out)) == 1
    assert "[rank" not in out + err


def test_mpi_tests_are_deselected_without_with_mpi(run):
    code, out, _ = run(
        """
@pytest.mark.mpi
def test_mpi(comm): pass
def test_serial(): pass
"""
    )
    assert code == 0
    assert "1 passed, 1 deselected" in out


def test_too_few_ranks(run):
    code, out, _ = run(
        """
@pytest.mark.mpi(min_size=4)
def test_4(comm): pass
@pytest.mark.mpi
@pytest.mark.multirank
def test_2(comm): pass
""",
        ranks=1,
    )
    assert code != 0
    assert "2 errors" in out
    assert "needs 4 ranks, has 1" in out
    assert "needs 2 ranks, has 1" in out


@pytest.mark.parametrize("mark, ranks", [("mpi(minsize=2)", 2), ("mpi(2)", 0)])
def test_misspelt_mark(run, mark, ranks):
    code, _, err = run(f"@pytest.mark.{mark}\ndef test(comm): pass", ranks=ranks)
    assert code != 0
    assert "takes min_size=N only" in err


def test_unknown_mark(run):
    code, out, _ = run("@pytest.mark.mpl\ndef test(): pass")
    assert code != 0
    assert "'mpl' not found in `markers`" in out


def test_comm_without_the_mark(run):
    code, _, err = run("def test(comm): pass")
    assert code != 0
    assert "uses comm but is not marked mpi" in err


def test_skip(run):
    code, out, _ = run(
        """
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
"""
    )
    assert code != 0
    assert "2 failed, 3 errors" in out
    assert "skipped, which counts as a failure: because" in out


def test_skip_of_a_whole_file(run):
    code, out, _ = run("pytest.importorskip('no_such_module')\ndef test(): pass")
    assert code != 0
    assert "skipped, which counts as a failure: could not import" in out


def test_skip_for_want_of_a_gpu(run):
    code, out, _ = run("def test(): pytest.skip('no GPU here')\ndef test_more(): pass")
    assert code == 0
    assert "1 passed, 1 skipped" in out


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


def test_setup_that_fails_on_one_rank(run):
    code, out, _ = run(
        """
@pytest.fixture
def broken(comm): assert comm.rank != 1
@pytest.mark.mpi
def test_it(comm, broken): comm.Barrier()
@pytest.mark.mpi
def test_more(comm): comm.Barrier()
""",
        ranks=2,
    )
    assert code != 0
    assert "1 passed, 1 error" in out


def test_ranks_that_collect_other_tests(run):
    code, out, err = run(
        """
from mpi4py import MPI
@pytest.mark.mpi
@pytest.mark.parametrize("x", range(MPI.COMM_WORLD.rank + 1))
def test_it(comm, x): pass
""",
        ranks=2,
    )
    assert code != 0
    assert "not all ranks collected the same tests" in out + err


def test_rank_that_cannot_import(run):
    code, _, err = run(
        """
from mpi4py import MPI
assert MPI.COMM_WORLD.rank == 0, "only here"
@pytest.mark.mpi
def test_it(comm): pass
""",
        ranks=2,
    )
    assert code != 0
    assert re.search(r"^\[rank 1\] E +AssertionError: only here$", err, re.MULTILINE)


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
