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
TOO_FEW = """
@pytest.mark.mpi(min_size=4)
def test_4(comm): pass
@pytest.mark.mpi
@pytest.mark.multirank
def test_2(comm): pass
"""
# By ranks (0: without mpiexec) and name: a test file, whether its run succeeds, and what is said.
CASES = {
    (0, "deselected"): ("""
@pytest.mark.mpi
def test_mpi(comm): pass
def test_serial(): pass
""", True, ["1 passed, 1 deselected"]),
    (0, "misspelt"): ("@pytest.mark.mpi(minsize=2)\ndef test(comm): pass", False,
                      ["test_misspelt.py::test: mpi takes min_size=N only"]),
    (0, "unmarked"): ("def test(comm): pass", False,
                      ["test_unmarked.py::test: uses comm but is not marked mpi"]),
    (0, "hidden"): ("@getattr(pytest.mark, 'mpi')\ndef test(comm): pass", False,
                    ["test_hidden.py::test: is marked, but the file lacks `mark.mpi`"]),
    (0, "skip"): ("""
@pytest.fixture
def missing(): pytest.skip("because")
@pytest.mark.skip("because")
def test_mark(): pass
def test_call(): pytest.skip("because")
def test_fixture(missing): pass
""", False, ["1 failed, 2 errors", "skipped, which counts as a failure: because"]),
    (0, "skip_of_file"): ("pytest.importorskip('no_such_module')\ndef test(): pass", False,
                          ["skipped, which counts as a failure: could not import"]),
    (0, "skip_for_gpu"): ("def test(): pytest.skip('no GPU here')\ndef test_more(): pass", True,
                          ["1 passed, 1 skipped"]),
    (1, "too_few"): (TOO_FEW, False, ["2 errors", "needs 4 ranks, has 1", "needs 2 ranks, has 1"]),
    (2, "too_few"): (TOO_FEW, False, ["1 passed, 1 error", "needs 4 ranks, has 2"]),
    (2, "setup"): ("""
@pytest.fixture
def broken(comm): assert comm.rank != 1
@pytest.mark.mpi
def test_it(comm, broken): comm.Barrier()
@pytest.mark.mpi
def test_more(comm): comm.Barrier()
""", False, ["1 passed, 1 error"]),
    (2, "collected"): ("""
from mpi4py import MPI
@pytest.mark.mpi
@pytest.mark.parametrize("x", range(MPI.COMM_WORLD.rank + 1))
def test_it(comm, x): pass
""", False, ["not all ranks collected the same tests"]),
    (2, "import"): ("""
from mpi4py import MPI
assert MPI.COMM_WORLD.rank == 0, "only here"
@pytest.mark.mpi
def test_it(comm): pass
""", False, ["\n[rank 1] E   AssertionError: only here\n"]),
    (2, "one_rank"): ("""
pytestmark = pytest.mark.mpi
def test_0(comm): assert comm.rank != 0, "zero"
def test_1(comm): assert comm.rank != 1, "one"
def test_step(comm): assert_all(comm, comm.allreduce(1) == 2, "out of step")
def test_said(comm): assert_all(comm, comm.rank != 1, "by one, said to all")
""", False, ["3 failed, 1 passed", "AssertionError: zero", "rank 1: by one, said to all",
             "passed on ranks [0]; failed on ranks [1]", "test_1 (call) failed:",
             "[rank 1] E   AssertionError: one"]),
}  # fmt: skip


def write(folder, name, text):
    """Write a test file with this text and its imports."""
    for needed in ("tests/conftest.py", "tests/support/helpers.py", "setup.cfg"):
        shutil.copy(ROOT / needed, folder)
    (folder / f"test_{name}.py").write_text(HEADER + text)


@pytest.fixture(scope="module", params=[0, 1, pytest.param(2, marks=launches)])
def runs(request, tmp_path_factory):
    """Run pytest on the files of a number of ranks; return outcomes by name, and all stderr."""
    folder, ranks = tmp_path_factory.mktemp("files"), request.param
    cases = {name: x for (number, name), x in CASES.items() if number == ranks}
    for name, (text, *_) in cases.items():
        write(folder, name, text)
    files = [(name, "--color=no", *["--with-mpi"] * (ranks > 0)) for name in cases]
    done = launch(ranks, "-c", EACH, json.dumps(files), timeout=120, cwd=folder)
    found = re.split(r"^exit codes ([\d ]+)\n", done.stdout, flags=re.MULTILINE)
    assert len(found) == 2 * len(cases) + 1, done.stdout + done.stderr
    codes = [set(map(int, x.split())) for x in found[1::2]]
    return {
        name: (*x, *cases[name][1:]) for name, *x in zip(cases, codes, found[::2])
    }, done.stderr


def test_outcomes(runs):
    found, stderr = runs
    for name, (codes, out, good, texts) in found.items():
        assert (codes == {0}) == good and (good or 0 not in codes), name
        assert all(x in out + stderr for x in texts), f"{name}: {out}{stderr}"
    # On stderr: all of what rank 0 cannot know, and only that.
    assert not re.search("test_0|by one", stderr)


@launches
@pytest.mark.parametrize("lines, said", [
    ('assert comm.rank != 0, "zero"', "did not follow within 0.5 s"),
    ("if comm.rank == 0: os.kill(os.getpid(), 9)", ""),
])  # fmt: skip
def test_others_that_wait_end(tmp_path, lines, said):
    text = "import os\nconftest.PATIENCE = 0.5\n@pytest.mark.mpi\ndef test(comm):\n"
    write(tmp_path, "it", f"{text}    {lines}\n    comm.recv(source=0)")
    options = ["test_it.py", "--color=no", "--with-mpi"]
    done = launch(2, "-m", "pytest", *options, timeout=120, cwd=tmp_path, code=None)
    assert done.returncode and said in done.stderr
    assert not said or re.search(r"^\[rank 0\] E +AssertionError: zero$", done.stderr, re.M)


def test_files_that_need_torch_are_those_that_are_left_out():
    """An ordinary run, without PyTorch, would fail in any other one."""
    needs = r"^(import|from) (torch|transformers|a2d_mpi\.torch)\b"
    files = [
        x for x in (ROOT / "tests").rglob("test_*.py") if re.search(needs, x.read_text(), re.M)
    ]
    assert files and {x.parent for x in files} == {ROOT / "tests" / "torch"}
