"""The rules of a test run.

Marks, see docs/testing.md:

* ``mpi`` or ``mpi(min_size=4)``: runs on all ranks, with ``--with-mpi`` only;
* ``multirank``: needs more than one rank;
* ``launches``: serial, but starts ranks in a way in which MPIs differ, so it runs with each MPI;
* ``one_mpi``: runs on all ranks, but a second MPI cannot change its result;
* ``ulfm``: needs an MPI that continues when ranks die, so it runs with Open MPI only;
* ``thorough``: tests in depth what another test covers, so it is not in the first tier.

No test is left out silently.  Too few ranks, a misspelt mark and a skip are failures.  A skip is
allowed if its reason starts with "no products" (a CPU without them), or with "no GPU" if
A2D_TEST_GPU is not set.

Files of the folder torch need PyTorch and run only if they are named: ``bash jobs/test.sh torch``.

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

import a2d_mpi  # noqa: F401  (before NumPy: products of NumPy 2.5.2 crash on some CPUs otherwise)

PATIENCE = 20  # seconds that a rank which failed waits for the others before it ends the run
LOCKSTEP = pytest.StashKey()
HERE = Path(__file__).parent
EMULATED = HERE / "gpu" / "emulated"
TORCH = HERE / "torch"


@pytest.fixture(scope="session")
def comm():
    """Return a communicator of all ranks of the run that only tests use."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def grid(comm):
    """Return a grid of one row of all ranks."""
    from a2d_mpi import ProcessGrid

    grid = ProcessGrid(comm, 1, comm.size)
    yield grid
    grid.free()


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
    """Return the module `cupy`: the real one on a machine with a GPU, or tests/gpu/emulated.

    ``cupy.kind`` says which.
    """
    saved = {x: sys.modules.pop(x) for x in list(sys.modules) if _is_of_gpu(x)}
    if request.param == "emulated":
        sys.path.insert(0, str(EMULATED))
        # A real cuDNN would get pointers of the host.  It cannot be imported twice.
        hidden = pytest.MonkeyPatch()
        hidden.setitem(sys.modules, "cudnn", None)
    try:
        yield _import_cupy(request.param)
    finally:
        if request.param == "emulated":
            sys.path.remove(str(EMULATED))
            hidden.undo()
        for x in [x for x in sys.modules if _is_of_gpu(x)]:
            del sys.modules[x]
        sys.modules.update(saved)


@pytest.fixture
def gpus(cupy, comm):
    """Bind a GPU, and return how arrays get there and back."""
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    return {"upload": cupy.asarray, "download": cupy.asnumpy}


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


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    files = [path for path in HERE.rglob("test_*.py") if not _is_of_no_rank(path, config)]
    if any("hypothesis" in path.read_text() for path in files):
        _same_examples(config.getoption("--hypothesis-seed"))
    path = os.environ.pop("A2D_TEST_RECORD", None)  # other runs, which tests start, have none
    if path and MPI.COMM_WORLD.rank == 0:
        config.pluginmanager.register(Record(path))
    if config.getoption("--with-mpi"):
        config.stash[LOCKSTEP] = Lockstep(MPI.COMM_WORLD.Dup())
        config.pluginmanager.register(config.stash[LOCKSTEP])
        if MPI.COMM_WORLD.rank != 0:
            config.pluginmanager.unregister(name="terminalreporter")
    else:
        # SIGTERM acts as Ctrl-C: processes that a test has started end, too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _same_examples(seed):
    """Let Hypothesis draw the same examples on every rank, without a seed in every run."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same everywhere",
        derandomize=seed is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same everywhere")


def pytest_ignore_collect(collection_path, config):
    # pytest does not ask for files and folders that are named.
    return collection_path == TORCH or _is_of_no_rank(collection_path, config) or None


def _is_of_no_rank(path, config):
    """Return True if this run takes no test of a file, whose imports cost a second."""
    only_mpi = config.getoption("--with-mpi") and config.option.markexpr.startswith("mpi")
    return only_mpi and path.suffix == ".py" and not _names_the_mark(path)


@cache
def _names_the_mark(path):
    return "mark.mpi" in path.read_text()


# Run first: pytest-mpi would skip tests that this hook deselects, and tests that need more ranks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        # pytest-mpi ignores unknown arguments of a mark, such as the `minsize` of its own manual.
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
        if reason.startswith("no products"):
            return
        if not reason.startswith("no GPU") or os.environ.get("A2D_TEST_GPU"):
            report.outcome = "failed"
            report.longrepr = f"skipped, which counts as a failure: {reason}"


class Record:
    """Adds each test that begins, its outcome and its end to a file, for runs that are killed."""

    def __init__(self, path):
        self._path = path

    def _add(self, what, nodeid):
        with open(self._path, "a") as file:
            file.write(f"{what} {nodeid}\n")

    def pytest_runtest_logstart(self, nodeid):
        self._add("began", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self._add(report.outcome, report.nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self._add("ended", nodeid)


class Lockstep:
    """Runs the same tests on all ranks of `comm`, with the same outcome."""

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
        """Turn `report` into a failure if a rank has another outcome, or a failure."""
        arrived = self.comm.Ibarrier()
        if report.failed:
            # Other ranks may be inside the test and wait for a message that this rank did not
            # send.
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
            self.comm.Abort(exitstatus)  # other ranks would wait for this rank

    def _print(self, text):
        lines = "".join(f"[rank {self.comm.rank}] {line}\n" for line in text.splitlines())
        sys.stderr.write(lines)
        sys.stderr.flush()
