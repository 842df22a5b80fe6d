"""The rules of a test run.

Marks: ``mpi`` or ``mpi(min_size=4)``, runs with ``--with-mpi`` only, on all ranks; ``multirank``,
needs more than one of them; ``launches``: serial, but starts ranks in ways in which MPIs differ,
and so runs with each of them; ``one_mpi``: on all ranks, but about numbers, which a second MPI
cannot change: it has carried the bytes of other cases; ``ulfm``: needs an MPI that goes on when
ranks die, and so runs with Open MPI only; ``thorough``: goes deeper into what another
test covers, and so is not in the first tier (docs/testing.md).  Nothing is passed over in silence:
too few ranks, a skip (unless its reason starts with "no GPU", and A2D_TEST_GPU is not set) and a
misspelt mark are failures.

The files of `TORCH` need PyTorch and run only if they are named: ``bash jobs/test.sh torch``.

Two runs with the same ``--share FOLDER`` share the test files out among them.

With ``--with-mpi`` the ranks stay in step: a setup, call or teardown that fails on one rank fails
on all of them.  Rank 0 reports; another rank prints a failure of its own to stderr.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from mpi4py import MPI

PATIENCE = 20  # seconds that a rank which failed waits for the others before it ends the run
LOCKSTEP = pytest.StashKey()
TAKEN = pytest.StashKey()
HERE = Path(__file__).parent
EMULATED = HERE / "emulated"
TORCH = ("test_llama.py", "test_torch.py", "test_transformers.py")


@pytest.fixture(scope="session")
def comm():
    """All ranks of the run, in a communicator of the tests' own."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def grid_of(comm):
    """Make a grid of all ranks, as `ProcessGrid` does; it is freed after the test."""
    from a2d_mpi import ProcessGrid

    grids = []

    def make(*shape, **options):
        grids.append(ProcessGrid(comm, *shape, **options))
        return grids[-1]

    yield make
    for grid in grids:
        grid.free()


@pytest.fixture(scope="module", params=["emulated", "real"])
def cupy(request):
    """The module `cupy`: that of tests/emulated, and the real one where it finds a GPU.

    ``cupy.kind`` says which.
    """
    saved = {x: sys.modules.pop(x) for x in list(sys.modules) if _is_of_gpu(x)}
    if request.param == "emulated":
        sys.path.insert(0, str(EMULATED))
    try:
        yield _import_cupy(request.param)
    finally:
        if request.param == "emulated":
            sys.path.remove(str(EMULATED))
        for x in [x for x in sys.modules if _is_of_gpu(x)]:
            del sys.modules[x]
        sys.modules.update(saved)


def _is_of_gpu(module):
    return module.split(".")[0] == "cupy" or module in (
        "a2d_mpi.devices.cuda",
        "a2d_mpi.kernels.cupy",
        "a2d_mpi.kernels.cudnn",
    )


def _import_cupy(kind):
    if kind == "emulated" and shutil.which("g++") is None:
        pytest.skip("no GPU emulation: g++ is not installed")
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        if kind == "emulated":
            raise
        pytest.skip("no GPU packages: cupy is not installed")
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    cupy.kind = kind
    return cupy


def pytest_addoption(parser):
    text = "run only test files of which no other run has said, in this folder, that it runs them"
    parser.addoption("--share", metavar="FOLDER", type=Path, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    folder, taken = item.config.getoption("--share"), item.config.stash[TAKEN]
    if folder and item.path not in taken:
        try:
            (folder / item.path.name).mkdir()
            taken[item.path] = True
        except FileExistsError:
            taken[item.path] = False
    return None if taken.get(item.path, True) else True


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.stash[TAKEN] = {}
    files = [path for path in HERE.glob("test_*.py") if not _is_of_no_rank(path, config)]
    if any("hypothesis" in path.read_text() for path in files):
        _same_examples()
    if config.getoption("--with-mpi"):
        config.stash[LOCKSTEP] = Lockstep(MPI.COMM_WORLD.Dup())
        config.pluginmanager.register(config.stash[LOCKSTEP])
        if MPI.COMM_WORLD.rank != 0:
            config.pluginmanager.unregister(name="terminalreporter")
    else:
        # As Ctrl-C does: what a test has started is ended too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _same_examples():
    """The same examples on every rank and in every run, however slow the machine."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same everywhere",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same everywhere")


def pytest_ignore_collect(collection_path, config):
    # pytest does not ask for files that are named.
    needs_torch = collection_path.name in TORCH
    return needs_torch or _is_of_no_rank(collection_path, config) or None


def _is_of_no_rank(path, config):
    """Whether a file has no test that this run takes: imports cost every rank a second."""
    only_mpi = config.getoption("--with-mpi") and config.option.markexpr.startswith("mpi")
    return only_mpi and path.suffix == ".py" and not _names_the_mark(path)


@cache
def _names_the_mark(path):
    return "mark.mpi" in path.read_text()


# First: pytest-mpi would skip what is to be deselected here, and skip for want of ranks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        # pytest-mpi ignores what it does not know, such as the `minsize` of its own manual.
        for mark in item.iter_markers("mpi"):
            if mark.args or not set(mark.kwargs) <= {"min_size"}:
                raise pytest.UsageError(f"{item.nodeid}: mpi takes min_size=N only, got {mark}")
        if item.get_closest_marker("mpi") and not _names_the_mark(item.path):
            raise pytest.UsageError(f"{item.nodeid}: is marked, but the file lacks `mark.mpi`")
        if "comm" in item.fixturenames and not item.get_closest_marker("mpi"):
            raise pytest.UsageError(f"{item.nodeid}: uses comm but is not marked mpi")
    without = ["mpi"] * (not config.getoption("--with-mpi"))
    vendor, version = MPI.get_vendor()
    without += ["ulfm"] * (vendor != "Open MPI" or version < (5,))
    left_out = [item for item in items if any(map(item.get_closest_marker, without))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.config.getoption("--with-mpi"):
        needs = [mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")]
        needs += [2] * (item.get_closest_marker("multirank") is not None)
        has = MPI.COMM_WORLD.size
        if has < max(needs, default=1):
            pytest.fail(f"needs {max(needs)} ranks, has {has}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    report = yield
    _refuse_skip(report)
    if LOCKSTEP in item.config.stash:
        item.config.stash[LOCKSTEP].agree(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report):
    """Turn a skip into a failure."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith("no GPU") or os.environ.get("A2D_TEST_GPU"):
            report.outcome = "failed"
            report.longrepr = f"skipped, which counts as a failure: {reason}"


class Lockstep:
    """The same tests with the same outcome on all ranks of `comm`."""

    def __init__(self, comm):
        self.comm = comm
        self.collection_errors = []

    def pytest_collectreport(self, report):
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session):
        mine = [item.nodeid for item in session.items] + self.collection_errors
        first = self.comm.bcast(mine)
        if mine != first:
            for error in self.collection_errors:
                self._print(error)
        if self.comm.allreduce(mine != first):
            raise pytest.UsageError("not all ranks collected the same tests")

    def agree(self, report):
        """Make `report` a failure if the outcome is another, or a failure, on any rank."""
        arrived = self.comm.Ibarrier()
        if report.failed:
            # The others may be inside the test, waiting for what this rank did not send.
            deadline = time.monotonic() + PATIENCE
            while not arrived.Test():
                if time.monotonic() > deadline:
                    self._print(f"{report.nodeid} ({report.when}) failed:\n{report.longreprtext}")
                    self._print(f"the other ranks did not follow within {PATIENCE} s: aborting")
                    self.comm.Abort(1)
                time.sleep(0.01)
        arrived.Wait()
        # The message alone: the whole text holds addresses, which differ.
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        reports = self.comm.allgather((report.outcome, message))
        rank = self.comm.rank
        if report.failed:
            # What a lower rank says need not be said again.
            if rank != 0 and reports[rank] not in reports[:rank]:
                self._print(f"{report.nodeid} ({report.when}) failed:\n{report.longreprtext}")
        elif any(outcome != report.outcome for outcome, _ in reports):
            ranks = {x: [r for r, (y, _) in enumerate(reports) if x == y] for x, _ in reports}
            report.outcome = "failed"
            report.longrepr = "; ".join(f"{x} on ranks {r}" for x, r in ranks.items())

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            self.comm.Abort(exitstatus)  # the others go on and would wait for this rank

    def _print(self, text):
        lines = "".join(f"[rank {self.comm.rank}] {line}\n" for line in text.splitlines())
        sys.stderr.write(lines)
        sys.stderr.flush()
